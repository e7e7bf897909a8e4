"""Checks packed sequences: documents laid end to end in one sequence, whose boundaries every attention layer needs.

Megatron calls the format THD. Each rank reads the boundaries with its own data and passes them to its chunks, so the
pipeline transports only activations of one shape, as always.
"""

from __future__ import annotations

import argparse

from megatron_vp.errors import UserError
from megatron_vp.mcore.training.capture import Capture
from megatron_vp.runtime.model import Shapes


def packs_sequences(args: argparse.Namespace) -> bool:
    """Whether Megatron's scripts join the sequences of a microbatch into one packed sequence."""
    return bool(args.sft or args.dataloader_inter_document_masking)


def check_packed(captured: Capture, shapes: Shapes, context_size: int) -> None:
    """Raise UserError for packed sequences that our passes cannot run; nothing is read from a device.

    Args:
        captured: one microbatch of one chunk.
        shapes: the sizes of every microbatch.
        context_size: the number of ranks that share a sequence.
    """
    packed = captured.argument("packed_seq_params")
    if packed is None:
        return
    ends = getattr(packed, "cu_seqlens_q", None)
    if getattr(packed, "qkv_format", None) != "thd" or ends is None:
        raise UserError(
            f"this forward_step calls the model with packed sequences in the format "
            f"{getattr(packed, 'qkv_format', None)}: the format has to be thd, with cu_seqlens_q; change that, or "
            f"leave --vocab-parallel and --pipeline-schedule out"
        )
    if packed.local_cp_size is not None:
        raise UserError(
            "packed sequences cut over context-parallel groups of their own (--hybrid-context-parallel) are not "
            "supported: every microbatch must have the same shape; leave it out"
        )
    padded = packed.cu_seqlens_q_padded
    if shapes.mtp_depth:
        _check_further_predictions(context_size, padded is not None and padded is not ends)
    if shapes.batch > 1:
        raise UserError(
            f"packed sequences in a micro batch of {shapes.batch}: joined into one sequence, they would not have the "
            f"shape for which receives are posted; use --micro-batch-size 1, or --sft or "
            "--dataloader-inter-document-masking, "
            f"which announce it"
        )
    for name in ("input_ids", "labels"):
        value = captured.argument(name)
        if value is not None and tuple(value.shape) != (1, shapes.sequence):
            raise _different_lengths(shapes, f"{name} of shape {list(value.shape)}")
    ends = ends if padded is None else padded
    if ends.device.type == "cpu" and int(ends[-1]) != shapes.sequence * context_size:
        raise _different_lengths(shapes, f"documents that end at position {int(ends[-1])}")


def _check_further_predictions(context_size: int, has_gaps: bool) -> None:
    if context_size > 1:
        raise UserError(FURTHER_PREDICTIONS_IN_PIECES)
    if has_gaps:
        raise UserError(
            "--mtp-num-layers and packed sequences with padding between documents (cu_seqlens_q_padded) are not "
            "supported: Megatron shifts labels by the lengths without it, which do not say where documents lie; pad "
            "packs at their end only, or leave --mtp-num-layers out"
        )


FURTHER_PREDICTIONS_IN_PIECES = (
    "--context-parallel-size with packed sequences and --mtp-num-layers is not supported: the tokens that follow a "
    "position "
    "may be in another piece of the document, on another rank; use one of them"
)


def _different_lengths(shapes: Shapes, found: str) -> UserError:
    return UserError(
        f"packed sequences of different lengths: receives are posted for one shape, {shapes.sequence} tokens, and this "
        f"forward_step gave the model {found}; pad every pack to --seq-length"
    )
