"""Checks packed sequences. A packed sequence (format THD) consists of several documents, and every attention layer must
know where each document begins and ends.

Each pipeline rank reads the document boundaries itself and passes them to its chunks. The pipeline therefore need not
transport the boundaries.
"""

from __future__ import annotations

from megatron_vp.errors import UserError
from megatron_vp.jobs.known_options import Arguments
from megatron_vp.mcore.training.capture import Capture
from megatron_vp.runtime.buffers import Shapes


def packs_sequences(args: Arguments) -> bool:
    """Whether Megatron's scripts join the sequences of a microbatch into one packed sequence."""
    return bool(args.sft or args.dataloader_inter_document_masking)


def check_packed(captured: Capture, shapes: Shapes, context_size: int) -> None:
    """Raise UserError if our passes cannot run a microbatch's packed sequences. The ends of documents are checked only
    if they are in CPU memory.

    `context_size`: the number of context-parallel ranks.
    """
    packed = captured.argument("packed_seq_params")
    if packed is None:
        return
    ends = getattr(packed, "cu_seqlens_q", None)
    if getattr(packed, "qkv_format", None) != "thd" or ends is None:
        raise UserError(
            f"this forward_step passes packed sequences in the format {getattr(packed, 'qkv_format', None)} to the "
            "model, but only the format thd with cu_seqlens_q is supported: use this format, or leave --vocab-parallel "
            "and --pipeline-schedule out"
        )
    padded = packed.cu_seqlens_q_padded
    if shapes.mtp_depth and (context_size > 1 or (padded is not None and padded is not ends)):
        raise UserError(
            "--mtp-num-layers with packed sequences does not support --context-parallel-size above 1, because the next "
            "tokens may be on another rank, nor padding between documents (cu_seqlens_q_padded), because Megatron "
            "shifts labels by the unpadded lengths: pad packs only at the end, or leave one of these options out"
        )
    if shapes.batch > 1:
        raise UserError(
            f"packed sequences with --micro-batch-size {shapes.batch} are supported only with --sft or "
            "--dataloader-inter-document-masking, because otherwise the schedule expects separate sequences: use one "
            "of these options, or --micro-batch-size 1"
        )
    shape, found = [1, shapes.sequence], []
    for name in ("input_ids", "labels"):
        value = captured.argument(name)
        if value is not None and list(value.shape) != shape:
            found.append(f"{name} of shape {list(value.shape)}")
    ends = ends if padded is None else padded
    if ends.device.type == "cpu" and int(ends[-1]) != shapes.sequence * context_size:
        found.append(f"documents that end at position {int(ends[-1])}")
    for each in found:
        raise UserError(
            f"forward_step passed {each} to the model, but pipeline ranks exchange tensors of one fixed shape, here "
            f"{shapes.sequence} tokens: pass the length of a packed sequence as seq_length (--seq-length in Megatron's "
            "scripts), and pad every packed sequence to it"
        )
