"""Descriptions of hardware: the rates of one GPU, and the links between GPUs."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from megatron_vp.cost.hardware.constants import CALIBRATED, Constants
from megatron_vp.errors import UserError

TERA, GIGA, GIB = 1e12, 1e9, 2**30


@dataclass(frozen=True)
class Rates:
    """The rates that one GPU sustains, from cited sources; this project has measured none of them.

    gemm: FLOP/s of large bf16 matrix products.
    fp8_gemm, fp4_gemm: FLOP/s of large fp8 and fp4 matrix products; 0 if the GPU does not support them.
    copy: bytes/s of a copy on the device, counting reads and writes.
    issue: thread instructions/s.
    any_layout_fp8: whether tensor cores support scale blocks of 32 elements (mxfp8) and multiply fp8 operands in any
        layout, which makes transposed copies unnecessary.
    attention: shares of the peak that fused attention reaches in the forward and in the backward, for long sequences
        and a head size of 128, counting only the causal half; None: use the shares of the paper's code.
    flash_attention_2: the same shares for FlashAttention 2; None: as fast as `attention`.
    gap: fixed seconds per pass; 0: use the gap of the paper's code.
    """

    gemm: float
    fp8_gemm: float
    copy: float
    issue: float
    source: str
    any_layout_fp8: bool = False
    attention: tuple[float, float] | None = None
    flash_attention_2: tuple[float, float] | None = None
    gap: float = 0.0
    fp4_gemm: float = 0.0


@dataclass(frozen=True)
class HostLink:
    """Bandwidth between one GPU and host memory while all GPUs of the node copy; cited, not measured by this project.

    out, back: bytes/s to pinned host memory and back from it, if copies run in only one direction at a time.
    memory: bytes of host memory per GPU.
    """

    out: float
    back: float
    memory: float
    source: str


_PCIE_5 = HostLink(
    out=50 * GIGA,
    back=50 * GIGA,
    memory=256 * GIB,
    source="bandwidth: estimated from the 55.6 GB/s that nvbandwidth reaches with a single GPU on PCIe 5 x16; memory: "
    "2 TB per node of 8 GPUs, from the data sheets of DGX H100, DGX H200 and DGX B200 (B200: up to 4 TB)",
)


@dataclass(frozen=True)
class Hardware:
    """Nominal figures of one GPU, its links and its node.

    peak_flops: dense FLOP/s in bf16 and fp16, without sparsity.
    memory: bytes of GPU memory that a process can use, as PyTorch reports them.
    memory_bandwidth: bytes/s.
    link_bandwidth, network_bandwidth: bytes/s of one GPU in one direction, inside a node and between nodes.
    rates: sustained rates; None if they are unknown or this project's kernels do not run on this hardware.
    constants: the fitted constants of the cost model.
    needs_one_queue: whether Megatron requires CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor and context parallelism.
    """

    name: str
    title: str
    peak_flops: float
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    gpus_per_node: int
    source: str
    host: HostLink
    rates: Rates | None = None
    is_gpu: bool = True
    needs_one_queue: bool = True
    constants: Constants = CALIBRATED

    @property
    def alike(self) -> Hardware:
        """This hardware with ranks that all take the same time for the same work."""
        return replace(self, constants=replace(self.constants, speed_spread=0.0, idle_boost=0.0))


_ALL = (
    Hardware(
        name="a100",
        title="NVIDIA A100 80 GB SXM",
        peak_flops=312 * TERA,
        memory=79.1 * GIB,
        memory_bandwidth=2039 * GIGA,
        link_bandwidth=300 * GIGA,
        network_bandwidth=25 * GIGA,
        gpus_per_node=8,
        source="NVIDIA A100 data sheet (NVLink 600 GB/s in both directions together); DGX A100: one 200 Gb/s port "
        "per GPU",
        host=HostLink(
            out=15 * GIGA,
            back=15 * GIGA,
            memory=256 * GIB,
            source="bandwidth: PipeOffload (arXiv 2503.01328, section 2), per GPU if two GPUs share a PCIe "
            "switch; a single GPU on PCIe 4 x16 reaches 24.8 GB/s in one direction at a time, but 24 GB/s to the host "
            "and 11 GB/s from it when copying in both directions at once (NVIDIA's developer forum); memory: 2 TB per "
            "DGX A100",
        ),
        rates=Rates(
            gemm=254 * TERA,
            fp8_gemm=0.0,
            copy=1.75 * TERA,
            issue=108 * 88 * 1.41 * GIGA,
            gap=0.85e-3,
            source="GEMMs: the share of the peak that the paper's A100s reach (constants.py); copies: 0.86 of the "
            "nominal bandwidth; instructions: 108 SMs at 1.41 GHz, each assumed to run 88 thread instructions per "
            "clock (an SM has 64 fp32 lanes and can issue 128)",
        ),
    ),
    Hardware(
        name="h100",
        title="NVIDIA H100 80 GB SXM",
        peak_flops=989.4 * TERA,
        memory=79.1 * GIB,
        memory_bandwidth=3350 * GIGA,
        link_bandwidth=450 * GIGA,
        network_bandwidth=50 * GIGA,
        gpus_per_node=8,
        source="NVIDIA H100 data sheet (NVLink 900 GB/s in both directions together); DGX H100: one 400 Gb/s port "
        "per GPU",
        host=_PCIE_5,
        rates=Rates(
            gemm=700 * TERA,
            fp8_gemm=1280 * TERA,
            copy=3.0 * TERA,
            issue=132 * 128 * 1.7 * GIGA,
            attention=(0.60, 0.55),
            flash_attention_2=(0.35, 0.33),
            source="GEMMs: public benchmarks, which reach 650 to 790 TFLOP/s in bf16, and 1280 TFLOP/s in fp8; copies: "
            "public device-to-device benchmarks; instructions: 132 SMs x 128 lanes at 1.7 GHz; attention: mean of "
            "cuDNN 9 and FlashAttention 3 in arXiv 2407.08608; FlashAttention 2: its rates in the same paper",
        ),
    ),
    Hardware(
        name="h200",
        title="NVIDIA H200 141 GB SXM",
        peak_flops=989.4 * TERA,
        memory=139.8 * GIB,
        memory_bandwidth=4800 * GIGA,
        link_bandwidth=450 * GIGA,
        network_bandwidth=50 * GIGA,
        gpus_per_node=8,
        source="NVIDIA H200 data sheet (NVLink 900 GB/s in both directions together); DGX H200: one 400 Gb/s port "
        "per GPU",
        host=_PCIE_5,
        rates=Rates(
            gemm=700 * TERA,
            fp8_gemm=1280 * TERA,
            copy=4.3 * TERA,
            issue=132 * 128 * 1.7 * GIGA,
            attention=(0.60, 0.55),
            flash_attention_2=(0.35, 0.33),
            source="GEMMs, instructions and attention: as for the H100; copies: assumed to reach the same share of the "
            "nominal memory bandwidth as on the H100 (0.9)",
        ),
    ),
    Hardware(
        name="b200",
        title="NVIDIA B200 180 GB",
        peak_flops=2250 * TERA,
        memory=178.3 * GIB,
        memory_bandwidth=8000 * GIGA,
        link_bandwidth=900 * GIGA,
        network_bandwidth=50 * GIGA,
        gpus_per_node=8,
        source="NVIDIA DGX B200 data sheet, totals divided by 8 GPUs (NVLink 1.8 TB/s in both directions together); "
        "one 400 Gb/s port per GPU",
        host=_PCIE_5,
        rates=Rates(
            gemm=1590 * TERA,
            fp8_gemm=2910 * TERA,
            fp4_gemm=5820 * TERA,
            copy=6.0 * TERA,
            issue=148 * 128 * 1.7 * GIGA,
            attention=(0.44, 0.35),
            source="GEMMs: assumed to reach the same shares of the nominal bf16, fp8 and fp4 rates as on the H100; "
            "attention: assumed; copies: just over 6 TB/s in public benchmarks; instructions: 148 SMs x 128 lanes at "
            "1.7 GHz",
            any_layout_fp8=True,
        ),
        needs_one_queue=False,
    ),
    Hardware(
        name="mi300x",
        title="AMD Instinct MI300X 192 GB",
        peak_flops=1307.4 * TERA,
        memory=191.9 * GIB,
        memory_bandwidth=5300 * GIGA,
        link_bandwidth=448 * GIGA,
        network_bandwidth=50 * GIGA,
        gpus_per_node=8,
        source="AMD's data sheets for the Instinct MI300X and its platform (seven links of 64 GB/s per direction); "
        "network: 400 Gb/s per GPU",
        host=_PCIE_5,
    ),
    Hardware(
        name="cpu",
        title="one CPU core of a small machine",
        peak_flops=0.1 * TERA,
        memory=4 * GIB,
        memory_bandwidth=10 * GIGA,
        link_bandwidth=2 * GIGA,
        network_bandwidth=0.1 * GIGA,
        gpus_per_node=64,
        source="order of magnitude for fp32 on one core with AVX2 at 3 GHz (32 FLOPs per cycle); measure your own "
        "machine",
        host=HostLink(
            out=5 * GIGA,
            back=5 * GIGA,
            memory=4 * GIB,
            source="bandwidth: half of the core's memory bandwidth, because a copy reads from and writes to the same "
            "memory; memory size: assumed",
        ),
        is_gpu=False,
        needs_one_queue=False,
    ),
)

HARDWARE = {entry.name: entry for entry in _ALL}


def find_hardware(name: str) -> Hardware:
    """The hardware called `name`, ignoring case; `mi300` means `mi300x`. Raises UserError for an unknown name."""
    found = HARDWARE.get(name.lower()) or HARDWARE.get(f"{name.lower()}x")
    if found is None:
        near = difflib.get_close_matches(name.lower(), HARDWARE, 1, 0)
        raise UserError(f"unknown hardware {name!r}: the nearest name is {near[0]!r}; use one of {', '.join(HARDWARE)}")
    return found
