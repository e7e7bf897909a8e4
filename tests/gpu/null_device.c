/* A CUDA device that does nothing, to run the host's side of a program without one.
 *
 * Preloaded, this library stands before CUDA's runtime, driver and cuBLAS, as far as PyTorch and Triton call them. It
 * answers for one H100, hands out addresses (of memory that nobody has touched, so that 80 GB fit anywhere), copies what
 * passes between host and device in small pieces, and drops every launch after a look at its grid: all that a kernel
 * would have written stays zero. Everything is over at once. What is called and not here, cuDNN and NCCL above all,
 * finds no driver and fails.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <vector_types.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONFIGURATION = 9, INVALID_DEVICE = 101 };
enum { HOST = 1, DEVICE = 2, MOST_BLOCKS = 1 << 16 };
static const size_t TOTAL = (size_t)81559 << 20, OF_THE_CONTEXT = (size_t)600 << 20;
static const size_t COPIED = 8 << 20, SHARED_MEMORY = 232448;

static struct block { char *start; size_t size; int kind; } blocks[MOST_BLOCKS];
static int block_count;
static size_t taken, most_taken, launches, modules, waits;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((destructor)) static void report(void) {
    const char *line = "null device: %zu launches, %zu modules, %zu bytes, %zu waits of the host for all of it\n";
    if (launches) fprintf(stderr, line, launches, modules, most_taken, waits);
}

/* Memory */

static int take(void **address, size_t size, int kind) {
    *address = NULL;
    pthread_mutex_lock(&lock);
    int place = 0;
    while (place < block_count && blocks[place].start) place++;
    int fits = place < MOST_BLOCKS && (kind == HOST || taken + size + OF_THE_CONTEXT <= TOTAL);
    void *start = MAP_FAILED;
    if (fits) start = mmap(NULL, size + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start != MAP_FAILED) {
        blocks[place] = (struct block){start, size, kind};
        if (place == block_count) block_count++;
        if (kind == DEVICE) taken += size;
        if (taken > most_taken) most_taken = taken;
        *address = start;
    }
    pthread_mutex_unlock(&lock);
    return *address ? SUCCESS : OUT_OF_MEMORY;
}

static struct block *holder(const void *address) {
    for (int place = 0; place < block_count; place++) {
        struct block *each = &blocks[place];
        if (each->start && (char *)address >= each->start && (char *)address <= each->start + each->size) return each;
    }
    return NULL;
}

static int kind_of(const void *address) {
    pthread_mutex_lock(&lock);
    struct block *found = holder(address);
    int kind = found ? found->kind : 0;
    pthread_mutex_unlock(&lock);
    return kind;
}

static int give_back(void *address) {
    pthread_mutex_lock(&lock);
    struct block *found = address ? holder(address) : NULL;
    if (found) {
        munmap(found->start, found->size + 1);
        if (found->kind == DEVICE) taken -= found->size;
        found->start = NULL;
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

static int copy(void *target, const void *source, size_t size) {
    int to = kind_of(target), from = kind_of(source);
    if (!(to == DEVICE && from == DEVICE) && size <= COPIED) memcpy(target, source, size);
    return SUCCESS;
}

int cudaMalloc(void **address, size_t size) { return take(address, size, DEVICE); }
int cudaHostAlloc(void **address, size_t size, unsigned flags) { return take(address, size, HOST); }
int cudaFree(void *address) { return give_back(address); }
int cudaFreeHost(void *address) { return give_back(address); }
int cudaMemcpy(void *target, const void *source, size_t size, int kind) { return copy(target, source, size); }
int cudaMemcpyAsync(void *target, const void *source, size_t size, int kind, void *stream) {
    return copy(target, source, size);
}
int cuMemcpyDtoHAsync_v2(void *target, uintptr_t source, size_t size, void *stream) {
    return copy(target, (void *)source, size);
}
int cudaMemsetAsync(void *address, int value, size_t size, void *stream) {
    launches++;
    if (size <= COPIED) memset(address, value, size);
    return SUCCESS;
}
int cudaMemset(void *address, int value, size_t size) { return cudaMemsetAsync(address, value, size, NULL); }
int cudaMemGetInfo(size_t *free, size_t *total) {
    *total = TOTAL;
    *free = TOTAL - taken - OF_THE_CONTEXT;
    return SUCCESS;
}
int cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
    memset(found, 0, sizeof *found);
    found->type = kind_of(address);
    found->device = found->type ? 0 : -2;
    if (found->type) found->devicePointer = (void *)address;
    if (found->type == HOST) found->hostPointer = (void *)address;
    return SUCCESS;
}
int cuPointerGetAttribute(void *found, int attribute, uintptr_t address) {
    *(uintptr_t *)found = address; /* Triton asks for the device's address */
    return kind_of((void *)address) ? SUCCESS : INVALID_VALUE;
}

/* The device */

static int attribute(int name) {
    switch (name) {
    case 1: case 2: case 3: return 1024; /* threads of a block */
    case 4: return 64;
    case 5: return INT32_MAX; /* blocks of a grid */
    case 6: case 7: return 65535;
    case 8: return 49152; /* shared memory of a block */
    case 10: return 32; /* threads of a warp */
    case 12: case 82: return 65536; /* registers */
    case 16: return 132; /* multiprocessors */
    case 39: return 2048; /* threads of a multiprocessor */
    case 75: return 9; /* compute capability */
    case 76: return 0;
    case 81: return 233472; /* shared memory of a multiprocessor */
    case 97: return SHARED_MEMORY; /* most of it that a block may ask for */
    case 106: return 32; /* blocks of a multiprocessor */
    default: return 1;
    }
}

int cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "null device, as an H100");
    found->totalGlobalMem = TOTAL;
    found->major = attribute(75);
    found->multiProcessorCount = attribute(16);
    found->warpSize = attribute(10);
    found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = INT32_MAX;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->maxThreadsPerMultiProcessor = attribute(39);
    found->maxBlocksPerMultiProcessor = attribute(106);
    found->sharedMemPerBlock = attribute(8);
    found->sharedMemPerBlockOptin = SHARED_MEMORY;
    found->sharedMemPerMultiprocessor = attribute(81);
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->l2CacheSize = 50 << 20;
    found->textureAlignment = 512;
    found->unifiedAddressing = found->canMapHostMemory = found->concurrentKernels = 1;
    return SUCCESS;
}
int cudaGetDeviceProperties_v2(struct cudaDeviceProp *found, int device) { return cudaGetDeviceProperties(found, device); }
int cudaGetDeviceCount(int *count) { return *count = 1, SUCCESS; }
int cuDeviceGetCount(int *count) { return *count = 1, SUCCESS; }
int cudaGetDevice(int *device) { return *device = 0, SUCCESS; }
int cuDeviceGet(int *device, int number) { return *device = number, SUCCESS; }
int cuCtxGetDevice(int *device) { return *device = 0, SUCCESS; }
int cudaSetDevice(int device) { return device ? INVALID_DEVICE : SUCCESS; }
int cudaDeviceGetAttribute(int *value, int name, int device) { return *value = attribute(name), SUCCESS; }
int cuDeviceGetAttribute(int *value, int name, int device) { return *value = attribute(name), SUCCESS; }
int cudaDeviceGetPCIBusId(char *name, int size, int device) { return snprintf(name, size, "0000:00:00.0"), SUCCESS; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, SUCCESS; }
int cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, SUCCESS; }
int cudaDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version); }
int cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = &lock, SUCCESS; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, SUCCESS; }
int cuCtxGetCurrent(void **context) { return *context = &lock, SUCCESS; }

/* Streams and events */

struct event { double milliseconds; };
int cudaEventCreateWithFlags(struct event **event, unsigned flags) {
    return *event = calloc(1, sizeof **event), SUCCESS;
}
int cudaEventCreate(struct event **event) { return cudaEventCreateWithFlags(event, 0); }
int cudaEventDestroy(struct event *event) { return free(event), SUCCESS; }
int cudaEventRecord(struct event *event, void *stream) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return event->milliseconds = 1e3 * now.tv_sec + 1e-6 * now.tv_nsec, SUCCESS;
}
int cudaEventRecordWithFlags(struct event *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
int cudaEventElapsedTime(float *time, struct event *start, struct event *end) {
    return *time = end->milliseconds - start->milliseconds, SUCCESS;
}
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return *stream = malloc(1), SUCCESS; }
int cudaStreamCreate(void **stream) { return *stream = malloc(1), SUCCESS; }
int cudaStreamGetPriority(void *stream, int *priority) { return *priority = 0, SUCCESS; }
int cudaStreamIsCapturing(void *stream, int *status) { return *status = 0, SUCCESS; }
int cuStreamIsCapturing(void *stream, int *status) { return cudaStreamIsCapturing(stream, status); }
int cudaStreamGetCaptureInfo(void *stream, int *status) { return *status = 0, SUCCESS; }

/* A stream that waits for a number holds up the host: all that was issued before is over. */
int cuStreamWriteValue32_v2(void *stream, uint32_t *address, uint32_t value, unsigned flags) {
    return __atomic_store_n(address, value, __ATOMIC_SEQ_CST), SUCCESS;
}
int cuStreamWaitValue32_v2(void *stream, uint32_t *address, uint32_t value, unsigned flags) {
    while (__atomic_load_n(address, __ATOMIC_SEQ_CST) < value) usleep(100);
    return SUCCESS;
}

int cudaDeviceSynchronize(void) { return waits++, SUCCESS; }

/* Launches */

static int blocking = -1;
static int launch(unsigned x, unsigned y, unsigned z, unsigned threads) {
    __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
    if (blocking < 0) blocking = getenv("CUDA_LAUNCH_BLOCKING") && atoi(getenv("CUDA_LAUNCH_BLOCKING"));
    if (blocking) cudaDeviceSynchronize();
    int fits = x && y && z && y <= 65535 && z <= 65535 && threads && threads <= 1024;
    return fits ? SUCCESS : INVALID_CONFIGURATION;
}
int __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, SUCCESS; }
int __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **values, size_t shared, void *stream) {
    return launch(grid.x, grid.y, grid.z, block.x * block.y * block.z);
}
int cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **values, size_t shared, void *stream) {
    return launch(grid.x, grid.y, grid.z, block.x * block.y * block.z);
}
int cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **values) {
    return launch(config->gridDim.x, config->gridDim.y, config->gridDim.z, config->blockDim.x);
}
int cuLaunchKernelEx(const unsigned *config, void *function, void **values, void **extra) {
    return config[6] > SHARED_MEMORY ? INVALID_VALUE : launch(config[0], config[1], config[2], config[3]);
}
int cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    found->ptxVersion = found->binaryVersion = 90;
    found->maxDynamicSharedSizeBytes = SHARED_MEMORY;
    return SUCCESS;
}
int cuFuncGetAttribute(int *value, int name, void *function) { return *value = name ? 0 : 1024, SUCCESS; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) { return *blocks = 2, SUCCESS; }
int cuModuleLoadData(void **module, const void *image) { return *module = &modules, modules++, SUCCESS; }
int cuModuleLoad(void **module, const char *path) { return cuModuleLoadData(module, path); }
int cuModuleGetFunction(void **function, void *module, const char *name) { return *function = module, SUCCESS; }
int cuGetErrorString(int error, const char **said) { return *said = "an error of the null device", SUCCESS; }

/* cuBLAS */

int cublasCreate_v2(void **handle) { return *handle = calloc(1, 64), SUCCESS; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0, SUCCESS; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0, SUCCESS; }
int cublasLtMatmulDescCreate(void **made) { return *made = calloc(1, 512), SUCCESS; }
int cublasLtMatmulPreferenceCreate(void **made) { return *made = calloc(1, 512), SUCCESS; }
int cublasLtMatrixLayoutCreate(void **made) { return *made = calloc(1, 512), SUCCESS; }
int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int asked, void *results, int *found
) {
    memset(results, 0, 128);
    return *found = 1, SUCCESS;
}

#define LAUNCHES(name) int name(void) { return launch(1, 1, 1, 1); }
LAUNCHES(cuLaunchKernel) LAUNCHES(cublasGemmEx) LAUNCHES(cublasGemmStridedBatchedEx) LAUNCHES(cublasLtMatmul)
LAUNCHES(cublasSgemmEx)
LAUNCHES(cublasSgemm_v2) LAUNCHES(cublasSgemmStridedBatched) LAUNCHES(cublasSgemv_v2) LAUNCHES(cublasSdot_v2)
LAUNCHES(cublasDgemm_v2) LAUNCHES(cublasDgemmStridedBatched) LAUNCHES(cublasDgemv_v2) LAUNCHES(cublasDotEx)

#define DOES_NOTHING(name) int name(void) { return SUCCESS; }
DOES_NOTHING(cublasDestroy_v2) DOES_NOTHING(cublasSetStream_v2) DOES_NOTHING(cublasSetWorkspace_v2)
DOES_NOTHING(cublasSetMathMode) DOES_NOTHING(cublasSetPointerMode_v2)
DOES_NOTHING(cublasLtMatmulDescSetAttribute) DOES_NOTHING(cublasLtMatmulPreferenceSetAttribute)
DOES_NOTHING(cublasLtMatrixLayoutSetAttribute) DOES_NOTHING(cublasLtMatmulDescDestroy)
DOES_NOTHING(cublasLtMatmulPreferenceDestroy) DOES_NOTHING(cublasLtMatrixLayoutDestroy)
DOES_NOTHING(cudaGetLastError) DOES_NOTHING(cudaPeekAtLastError)
DOES_NOTHING(cudaEventQuery) DOES_NOTHING(cudaEventSynchronize) DOES_NOTHING(cudaStreamDestroy)
DOES_NOTHING(cudaStreamQuery) DOES_NOTHING(cudaStreamSynchronize) DOES_NOTHING(cudaStreamWaitEvent)
DOES_NOTHING(cudaThreadExchangeStreamCaptureMode) DOES_NOTHING(cudaFuncSetAttribute) DOES_NOTHING(cudaMemcpyToSymbol)
DOES_NOTHING(cudaHostRegister) DOES_NOTHING(cudaHostUnregister)
DOES_NOTHING(cuInit) DOES_NOTHING(cuCtxSetCurrent) DOES_NOTHING(cuFuncSetAttribute) DOES_NOTHING(cuFuncSetCacheConfig)
DOES_NOTHING(cuCtxGetLimit) DOES_NOTHING(cuCtxSetLimit) DOES_NOTHING(cuModuleUnload)
DOES_NOTHING(cuStreamSynchronize) DOES_NOTHING(not_here)

/* Where PyTorch asks for the driver's functions by name */
int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, uint64_t flags, int *result) {
    *found = dlsym(dlopen("libcuda.so.1", RTLD_LAZY), name);
    if (!*found) *found = not_here;
    if (result) *result = 0;
    return SUCCESS;
}
