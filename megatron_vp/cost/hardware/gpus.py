"""Descriptions of hardware: the rates of one GPU, and the links between GPUs. `gpus.toml` lists them."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_vp.cost.hardware.constants import CALIBRATED, Constants
from megatron_vp.errors import UserError

GIGA, GIB = 1e9, 2**30
FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Rates:
    """The rates that one GPU sustains, from cited sources.

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
    launches: seconds in which the host launches the kernels of a forward through a layer with experts. A backward has
        twice as many.
    product: extra seconds per matrix product of an expert if a rank has several experts: for the product's launch, and
        for a last wave of tiles that leaves SMs idle.
    all_to_all: bandwidth of NCCL's all-to-all, relative to that of its rings and messages.

    `evidence/calibrate.py` fits the last three to published runs on H100.
    """

    gemm: float
    copy: float
    issue: float
    any_layout_fp8: bool = False
    attention: tuple[float, ...] | None = None
    flash_attention_2: tuple[float, ...] | None = None
    gap: float = 0.0
    fp8_gemm: float = 0.0
    fp4_gemm: float = 0.0
    launches: float = 2.88e-3
    product: float = 20e-6
    all_to_all: float = 0.5


@dataclass(frozen=True)
class HostLink:
    """Bandwidth between one GPU and host memory while all GPUs of the node copy.

    out, back: bytes/s to pinned host memory and back from it, if copies run in only one direction at a time.
    memory: bytes of host memory per GPU.
    """

    out: float
    back: float
    memory: float


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
    host: HostLink
    rates: Rates | None = None
    is_gpu: bool = True
    needs_one_queue: bool = True
    constants: Constants = CALIBRATED

    @property
    def alike(self) -> Hardware:
        """This hardware with ranks that all take the same time for the same work."""
        return replace(self, constants=replace(self.constants, speed_spread=0.0, idle_boost=0.0))


def _hardware(name: str, row: dict[str, Any]) -> Hardware:
    host, rates = row.pop("host"), row.pop("rates", None)
    for sized in (row, host):
        sized["memory"] *= GIB
    if rates is not None:
        shares = {each: tuple(share) for each, share in rates.items() if isinstance(share, list)}
        rates = Rates(**rates | shares)
    return Hardware(name, host=HostLink(**host), rates=rates, **row)


HARDWARE = {name: _hardware(name, row) for name, row in tomllib.loads(FILE.read_text()).items()}


def find_hardware(name: str) -> Hardware:
    """The hardware called `name`, ignoring case; `mi300` means `mi300x`. Raises UserError for an unknown name."""
    found = HARDWARE.get(name.lower()) or HARDWARE.get(f"{name.lower()}x")
    if found is None:
        near = difflib.get_close_matches(name.lower(), HARDWARE, 1, 0)
        raise UserError(f"unknown hardware {name!r}: the nearest name is {near[0]!r}; use one of {', '.join(HARDWARE)}")
    return found
