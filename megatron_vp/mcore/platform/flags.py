"""Decides whether this process runs on GPUs or CPUs, and sets the variables and flags that Megatron then needs."""

from __future__ import annotations

import argparse
import logging
import os
import warnings

import torch

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import asks_for_cpu, flag_value, option_of
from megatron_vp.mcore.platform.installed import INSTALL_ENGINE, Installed, installed
from megatron_vp.mcore.settled import ROLES, process

_FALLBACK_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "Only transformer-engine",
)


_Choice = tuple[str, str | None, bool]
"""A Megatron flag, its value (None for a switch), and whether it is needed."""


def _choices(cpu: bool, local: bool, torch_norm: bool, machine: Installed) -> tuple[_Choice, ...]:
    """List the flags that the platform, the layers that will be built and the machine's packages may need."""
    compiles = (cpu or local) and not process.counts_engine
    return (
        ("--distributed-backend", "gloo", cpu),
        ("--transformer-impl", "local", cpu or machine.engine is None),
        # Only Megatron's local attention needs Apex's kernel for the fused softmax.
        ("--no-masked-softmax-fusion", None, cpu or (local and not machine.apex)),
        # PyTorch would need minutes to compile these fused functions.
        ("--no-bias-gelu-fusion", None, compiles),
        ("--no-bias-swiglu-fusion", None, compiles),
        ("--no-bias-dropout-fusion", None, cpu or local),
        # Local layers, too, use Transformer Engine's kernel for fused rotary embeddings.
        ("--no-rope-fusion", None, cpu or machine.engine is None),
        # On a GPU without Apex, our own kernel accumulates weight gradients (`missing_packages.py`).
        ("--no-gradient-accumulation-fusion", None, cpu),
        ("--no-persist-layer-norm", None, cpu or (local and torch_norm)),
    )


def switch_off_what_needs_a_gpu(args: argparse.Namespace) -> str:
    """Switch off the options in validated arguments that need a GPU. Return a line that names them, or "" if no such
    option was given.
    """
    off = []
    for name, (need, *off_value) in ROLES["of_a_device"].items():
        value = next(iter(off_value), None)
        without_device = name == "profile" and args.use_pytorch_profiler
        if getattr(args, name) not in (None, value) and not without_device:
            setattr(args, name, value)
            off.append(f"{option_of(name)} (needs {need})")
    return f"on CPUs, these options are switched off: {', '.join(off)}" if off else ""


def uses_cpu(arguments: list[str]) -> bool:
    """Whether this run uses no CUDA device, because of `--cpu` or MEGATRON_VP_CPU=1, or because none is available."""
    return asks_for_cpu(arguments) or not torch.cuda.is_available()


def quiet_fallback_warnings() -> None:
    """Silence the import-time warnings that Transformer Engine, Apex or a device is missing.

    Instead, a job's banner names the implementations that the job uses.
    """
    # PyTorch's logger for extensions warns if a CUDA toolkit is installed but the machine has no device.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    for start in _FALLBACK_WARNINGS:
        warnings.filterwarnings("ignore", message=start, category=UserWarning)


def prepare_environment(cpu: bool) -> None:
    """Set the environment variables and a logger's level for a run without a device, before Megatron is imported."""
    if cpu:
        # Megatron requires this value for tensor parallelism, even without a device.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        # Hide the devices of this machine, if any, from PyTorch.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # Megatron warns if the CPU's generator was used, which is expected without a device.
        logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def platform_arguments(given: list[str], cpu: bool) -> list[str]:
    """Return the Megatron flags that this platform needs and that `given` (the flags of the user and of configuration
    files) does not set.

    These flags depend on the layers that will be built and on the machine's packages: a fused operation is switched off
    if no installed package implements it. Raises UserError if a given flag cannot work here, or if the job uses
    Transformer Engine's layers but Transformer Engine cannot be imported.
    """
    machine = installed()
    layers = flag_value(given, "--transformer-impl")
    if machine.engine_fault and not cpu and layers != "local":
        raise UserError(
            f"Transformer Engine is installed but cannot be imported: {machine.engine_fault}; reinstall it with "
            f"`{INSTALL_ENGINE}` (core_cu12 for CUDA 12), or use --transformer-impl local"
        )
    local = cpu or machine.engine is None or layers == "local"
    torch_norm = not machine.apex or flag_value(given, "--normalization") == "RMSNorm"
    chosen: list[str] = []
    for option, value, needed in _choices(cpu, local, torch_norm, machine):
        value_given = flag_value(given, option)
        if needed and value_given is None:
            chosen += [option] if value is None else [option, value]
        elif needed and value not in (None, value_given):
            where = "without a CUDA device" if cpu else "without Transformer Engine"
            raise UserError(
                f"{option} {value_given} cannot work {where}: use {option} {value}, or leave the option out"
            )
    return chosen
