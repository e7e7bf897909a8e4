# shellcheck shell=bash
# Functions for the batch files in this folder, which source this file. It sets the Python interpreter, the number of
# ranks and the rendezvous address, and starts the ranks. MEGATRON_VP_PYTHON overrides the interpreter that
# scripts/setup_env.sh installs. If MEGATRON_VP_CONTAINER_IMAGE is set (optionally with MEGATRON_VP_CONTAINER_MOUNTS,
# FROM:TO,...), everything that srun starts runs in that image, through SLURM's pyxis plug-in. Load modules before
# submitting: sbatch passes on the environment.

# The files and logs of a job contain its arguments, so other users must not be able to read them.
umask o=

shopt -s inherit_errexit # a failure inside $(...) ends the command substitution

fail() {
    printf '%s: error: %s\n' "${SLURM_JOB_NAME:-$0}" "$*" >&2
    exit 2
}

# number NAME LEAST [DEFAULT]: prints the value of an environment variable, a whole number. The value is checked first
# because Bash arithmetic would execute a $(...) in it, and would reject 08 as an octal number.
number() {
    local value=${!1:-${3:-}}
    if [[ ! $value =~ ^[0-9]{1,10}$ ]] || ((10#$value < $2)); then
        fail "$1 is '${value//[^[:print:]]/?}' but must be a whole number of at least $2"
    fi
    echo $((10#$value))
}

[[ -n ${SLURM_JOB_ID:-} ]] || fail "this is a batch script: start it with sbatch"
[[ -z ${SLURM_HET_SIZE:-} ]] ||
    fail "this is a heterogeneous job, and srun would start ranks only on its first group: submit it as one group"
# The batch script itself runs outside the container. The job's folder has the same path inside the container.
container=()
if [[ -n ${MEGATRON_VP_CONTAINER_IMAGE:-} ]]; then
    container=("--container-image=$MEGATRON_VP_CONTAINER_IMAGE" "--container-workdir=$PWD"
        "--container-mounts=$PWD:$PWD${MEGATRON_VP_CONTAINER_MOUNTS:+,$MEGATRON_VP_CONTAINER_MOUNTS}")
    python=${MEGATRON_VP_PYTHON:-python}
else
    python=${MEGATRON_VP_PYTHON:-.venv/bin/python}
    command -v "$python" >/dev/null || fail "no Python at $python: run scripts/setup_env.sh, or set MEGATRON_VP_PYTHON"
fi
readonly container python

# Prints the number of ranks per node: the tasks that the user requested, or one per GPU. If SLURM does not manage
# GPUs, nvidia-smi counts them.
count_ranks() {
    local gpus=0 tasks
    if [[ -n ${SLURM_GPUS_ON_NODE:-} ]]; then
        gpus=$(number SLURM_GPUS_ON_NODE 0)
    elif command -v nvidia-smi >/dev/null; then
        gpus=$(nvidia-smi --list-gpus | wc -l)
    fi
    if [[ -n ${SLURM_NTASKS_PER_NODE:-} ]]; then
        number SLURM_NTASKS_PER_NODE 1
    elif ((gpus > 0)); then
        echo "$gpus"
    elif [[ -n ${SLURM_NTASKS:-} ]]; then
        tasks=$(number SLURM_NTASKS 1)
        ((tasks % nodes_of_job == 0)) ||
            fail "$tasks tasks cannot be spread evenly over $nodes_of_job nodes: set --ntasks-per-node"
        echo $((tasks / nodes_of_job))
    else
        fail "$SLURMD_NODENAME has no GPU: set the number of ranks per node with sbatch --ntasks-per-node"
    fi
}

nodes_of_job=$(number SLURM_JOB_NUM_NODES 1)
cpus_of_node=$(number SLURM_CPUS_ON_NODE 1)
job_number=$(number SLURM_JOB_ID 0)
ranks_per_node=$(count_ranks)
readonly nodes_of_job cpus_of_node job_number ranks_per_node ranks=$((ranks_per_node * nodes_of_job))
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# A port below the ephemeral range. Jobs that share a node have different job numbers, so they get different ports.
[[ -z ${MASTER_ADDR:-} ]] || echo "ranks connect to MASTER_ADDR=$MASTER_ADDR, from the environment of sbatch"
export MASTER_ADDR=${MASTER_ADDR:-${nodes[0]}}
MASTER_PORT=$(number MASTER_PORT 1 $((15000 + job_number % 15000)))
export MASTER_PORT
# On a home that nodes share, ranks that compile the same kernels can delete each other's files.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton-${USER:-$UID}-$SLURM_JOB_ID}
export PYTHONUNBUFFERED=1

# check ARGUMENT...: one process per node checks the node, the arguments and the inputs. If a check fails, no rank is
# started.
check() {
    srun "${container[@]}" --ntasks="$nodes_of_job" --ntasks-per-node=1 \
        "$python" -m megatron_vp check --ranks "$ranks" --ranks-per-node "$ranks_per_node" "$@"
}

# Sets the variables that torchrun would set for a rank, from the variables of its SLURM task; MASTER_ADDR and
# MASTER_PORT are set above. `exec` makes the rank itself the process to which SLURM sends signals.
# shellcheck disable=SC2016 # the rank's shell expands it
readonly as_rank='export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
# The name of the folder can be guessed, so it may belong to another user, whose kernels must not be loaded.
mkdir -p -m 700 "$TRITON_CACHE_DIR" && [[ -O $TRITON_CACHE_DIR || $TRITON_CACHE_DIR != /tmp/triton-* ]] ||
    unset TRITON_CACHE_DIR
exec "$@"'

# train FOLDER MODULE ARGUMENT...: runs a Python module on all ranks, which log to files in FOLDER. If a rank fails,
# SLURM ends the other ranks.
train() {
    local folder=$1 cpus=$((cpus_of_node / ranks_per_node))
    shift
    mkdir -p "$folder"
    # srun replaces %4t by the rank; other percent signs are doubled so that srun leaves them.
    srun "${container[@]}" --ntasks="$ranks" --ntasks-per-node="$ranks_per_node" \
        --cpus-per-task=$((cpus > 0 ? cpus : 1)) --kill-on-bad-exit=1 --output="${folder//%/%%}/rank_%4t.log" \
        bash -c "$as_rank" rank "$python" -m "$@"
}
