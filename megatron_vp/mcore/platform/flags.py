"""Which platform this process runs on, and what Megatron must be told there: environment and flags."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings

import torch

from megatron_vp.errors import UserError

_FALLBACK_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "Only transformer-engine",
)

# (option, value; None for a bare flag)
_LOCAL_CHOICES = (
    ("--transformer-impl", "local"),
    ("--no-masked-softmax-fusion", None),
    ("--no-bias-gelu-fusion", None),
    ("--no-bias-swiglu-fusion", None),
    ("--no-bias-dropout-fusion", None),
    ("--no-rope-fusion", None),
    ("--no-gradient-accumulation-fusion", None),
    ("--no-persist-layer-norm", None),
)
_CPU_CHOICES = (("--distributed-backend", "gloo"), *_LOCAL_CHOICES)


nodes_have_engine: bool | None = None
"""Whether the nodes that a job is checked for have Transformer Engine (`elsewhere.py`); None: the job runs here."""


def wants_cpu(arguments: list[str]) -> bool:
    """Whether this run uses no CUDA device: `--cpu`, MEGATRON_VP_CPU=1, or none is there."""
    return asks_for_cpu(arguments) or not torch.cuda.is_available()


def asks_for_cpu(arguments: list[str]) -> bool:
    """Whether no CUDA device shall be used: `--cpu` or MEGATRON_VP_CPU=1."""
    return "--cpu" in arguments or os.environ.get("MEGATRON_VP_CPU") == "1"


def has_transformer_engine() -> bool:
    """Whether Transformer Engine, whose layers are Megatron's default, is installed where the job runs."""
    return engine_is_here() if nodes_have_engine is None else nodes_have_engine


def engine_is_here() -> bool:
    """Whether Transformer Engine is installed in this environment."""
    return importlib.util.find_spec("transformer_engine") is not None


def quiet_fallback_warnings() -> None:
    """Silence import-time warnings that Transformer Engine, Apex or a device is missing: one line says it once.

    In child processes too: the checkpoint writers of an asynchronous save import the script again.
    """
    # Where a CUDA toolkit is installed and no device.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    for start in _FALLBACK_WARNINGS:
        warnings.filterwarnings("ignore", message=start, category=UserWarning)
    filters = [word for word in os.environ.get("PYTHONWARNINGS", "").split(",") if word]
    filters += [f"ignore:{start}:UserWarning" for start in _FALLBACK_WARNINGS]
    os.environ["PYTHONWARNINGS"] = ",".join(dict.fromkeys(filters))


def prepare_environment(cpu: bool) -> None:
    """Set what must stand before Megatron is imported (variables, a logger's level); the user's variables stay."""
    if cpu:
        # Megatron asks for it under tensor parallelism, without a device too.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        # Devices that exist must not be found half-way by a part that asks torch itself.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # It warns of every draw that moved the CPU's generator; here that generator is the device's.
        logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def platform_arguments(given: list[str], cpu: bool) -> list[str]:
    """Megatron flags that this platform needs and `given` (flags of the user and of the configuration) leaves open.

    On CPU: gloo, local layers, no fused kernels. On GPUs without Transformer Engine: local layers and no fused kernels
    (chosen by reading Megatron; no GPU run stands behind it). Raises UserError where a given flag cannot work here.
    """
    choices = _CPU_CHOICES if cpu else () if has_transformer_engine() else _LOCAL_CHOICES
    chosen: list[str] = []
    for option, value in choices:
        value_given = stated(given, option)
        if value_given is None:
            chosen += [option] if value is None else [option, value]
        elif value is not None and value_given != value:
            where = "without a CUDA device" if cpu else "without Transformer Engine"
            raise UserError(
                f"{option} {value_given} cannot work {where}: use {option} {value}, or leave the option out"
            )
    return chosen


def stated(given: list[str], option: str) -> str | None:
    """The last value given to an option ("" for a bare flag), or None."""
    found = None
    for index, word in enumerate(given):
        name, equals, value = word.partition("=")
        if name == option:
            follower = given[index + 1] if index + 1 < len(given) else "--"
            found = value if equals else "" if follower.startswith("--") else follower
    return found
