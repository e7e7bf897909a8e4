"""The plug-in's arguments inside Megatron's own parser: added, expanded from the configuration, checked, refused.

Two functions of `megatron.training.arguments` are wrapped, so a script that knows nothing of the plug-in gets them too.
Everything here runs before a process group exists, and on every rank alike.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vp.errors import UserError
from megatron_vp.mcore import patches
from megatron_vp.mcore.checkpoint_check import check_checkpoint
from megatron_vp.mcore.config_file import arguments_from_config, write_resolved
from megatron_vp.mcore.dataset import check_inputs
from megatron_vp.mcore.platform import platform_arguments, wants_cpu

ALGORITHMS = ("vocab-1", "vocab-2")
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "v-min", "interlaced")
V_SHAPED_SCHEDULES = ("zb-v", "v-half", "v-min")
SPLIT_SCHEDULES = ("zb-h1", *V_SHAPED_SCHEDULES)
RESOLVED_NAME = "resolved_config.yaml"


@dataclass(frozen=True)
class Refusal:
    """A combination that cannot work: `applies(args)`, and the line that says what, why and what works instead."""

    applies: Callable[[argparse.Namespace], Any]
    message: str


def replaces_schedule(args: argparse.Namespace) -> bool:
    """Whether the plug-in runs the pipeline; plain `1f1b` is Megatron's own schedule, virtual stages included."""
    return args.vocab_parallel or args.pipeline_schedule != "1f1b"


def _keeps_layers(a: argparse.Namespace) -> bool:
    """A schedule of ours with Megatron's own vocabulary layers."""
    return replaces_schedule(a) and not a.vocab_parallel


def _evenly_cut(a: argparse.Namespace) -> bool:
    """Megatron gives every chunk the same number of layers."""
    placed = (
        a.pipeline_model_parallel_layout,
        a.hybrid_layer_pattern,
        a.decoder_first_pipeline_num_layers,
        a.decoder_last_pipeline_num_layers,
        a.account_for_embedding_in_pipeline_split or None,
        a.account_for_loss_in_pipeline_split or None,
    )
    return all(value is None for value in placed)


# What Megatron's own schedule runs and ours without --vocab-parallel does not.
_WITH_WHOLE_LAYERS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "--tensor-model-parallel-size {tensor_model_parallel_size}": lambda a: a.tensor_model_parallel_size > 1,
    "--context-parallel-size {context_parallel_size}": lambda a: a.context_parallel_size > 1,
    "--mtp-num-layers": lambda a: a.mtp_num_layers,
    "--num-experts": lambda a: a.num_experts,
    "FSDP": lambda a: a.use_megatron_fsdp or a.use_torch_fsdp2,
    "--cuda-graph-impl {cuda_graph_impl}": lambda a: a.cuda_graph_impl != "none",
    "--overlap-moe-expert-parallel-comm": lambda a: a.overlap_moe_expert_parallel_comm,
    "--delay-wgrad-compute": lambda a: a.delay_wgrad_compute,
    "--defer-embedding-wgrad-compute": lambda a: a.defer_embedding_wgrad_compute,
    "packed sequences (--sft, --dataloader-inter-document-masking)": lambda a: (
        a.sft or a.dataloader_inter_document_masking
    ),
    "--perform-rl-step": lambda a: a.perform_rl_step,
    "--logits-save-dir or --logits-load-dir": lambda a: a.logits_save_dir or a.logits_load_dir,
    "--fp32-residual-connection": lambda a: a.fp32_residual_connection,
    "fp8 or fp4": lambda a: a.fp8 or a.fp4,
}

# The order is the order of the checks; {names} are filled from the arguments.
REFUSALS = (
    Refusal(
        lambda a: a.pipeline_schedule == "interlaced" and not a.vocab_parallel,
        "--pipeline-schedule interlaced without --vocab-parallel has no vocabulary passes to interlace: use it with "
        "--vocab-parallel, or use 1f1b",
    ),
    Refusal(
        lambda a: _keeps_layers(a) and a.pipeline_model_parallel_size < 2,
        "--pipeline-schedule {pipeline_schedule} with one pipeline stage has nothing to order: use "
        "--pipeline-model-parallel-size 2 or more, or leave --pipeline-schedule out",
    ),
    Refusal(
        lambda a: (
            _keeps_layers(a) and a.pipeline_schedule in V_SHAPED_SCHEDULES and not a.untie_embeddings_and_output_weights
        ),
        "--pipeline-schedule {pipeline_schedule} with tied embeddings and without --vocab-parallel is not supported: "
        "the weight would belong to both chunks of the first rank; add --vocab-parallel or "
        "--untie-embeddings-and-output-weights, or use zb-h1",
    ),
    *(
        Refusal(
            lambda a, asks=asks: _keeps_layers(a) and asks(a),
            f"--pipeline-schedule {{pipeline_schedule}} without --vocab-parallel is not supported with {option}: leave "
            "one of them out (1f1b is Megatron's own schedule)",
        )
        for option, asks in _WITH_WHOLE_LAYERS.items()
    ),
    Refusal(
        lambda a: a.pipeline_schedule in SPLIT_SCHEDULES and a.transformer_impl != "local",
        "--pipeline-schedule {pipeline_schedule} with --transformer-impl {transformer_impl} is not supported yet: "
        "weight gradients are split off Megatron's local layers only; add --transformer-impl local, or use 1f1b",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.pipeline_model_parallel_size < 2,
        "--vocab-parallel with one pipeline stage has nothing to split: use --pipeline-model-parallel-size 2 or more, "
        "or leave --vocab-parallel out",
    ),
    Refusal(
        lambda a: (
            replaces_schedule(a)
            and a.virtual_pipeline_model_parallel_size is not None
            and a.pipeline_schedule not in ("interleaved", *V_SHAPED_SCHEDULES)
        ),
        "--pipeline-schedule {pipeline_schedule} has one chunk a rank: use --pipeline-schedule interleaved for virtual "
        "pipeline stages, or leave them out (--num-layers-per-virtual-pipeline-stage, "
        "--num-virtual-stages-per-pipeline-rank, layouts with more segments than ranks)",
    ),
    Refusal(
        lambda a: a.pipeline_schedule == "interleaved" and (a.virtual_pipeline_model_parallel_size or 1) < 2,
        "--pipeline-schedule interleaved needs several chunks: use it with --num-virtual-stages-per-pipeline-rank 2, "
        "or with a hybrid model whose --hybrid-layer-pattern has two or more segments a rank",
    ),
    Refusal(
        lambda a: (
            replaces_schedule(a)
            and _evenly_cut(a)
            and a.num_layers % (a.pipeline_model_parallel_size * (a.virtual_pipeline_model_parallel_size or 1))
        ),
        "--num-layers {num_layers} cannot be cut evenly for --pipeline-model-parallel-size "
        "{pipeline_model_parallel_size} with {virtual_pipeline_model_parallel_size} chunks a rank: use a multiple of "
        "their product, or say with --pipeline-model-parallel-layout which stage holds what",
    ),
    Refusal(
        lambda a: a.pipeline_schedule in V_SHAPED_SCHEDULES and a.virtual_pipeline_model_parallel_size != 2,
        "--pipeline-schedule {pipeline_schedule} has two chunks a rank: leave --pipeline-model-parallel-layout out, or "
        "give it (of a hybrid model, --hybrid-layer-pattern) two segments a rank",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.context_parallel_size > 1,
        "--vocab-parallel with --context-parallel-size {context_parallel_size} is not supported: the vocabulary passes "
        "take whole sequences; use --context-parallel-size 1",
    ),
    Refusal(
        lambda a: a.mtp_num_layers and a.hybrid_layer_pattern and a.pipeline_schedule in V_SHAPED_SCHEDULES,
        "--pipeline-schedule {pipeline_schedule} with a hybrid model of several heads is not supported: Megatron "
        "builds the heads on the last rank, a V ends on the first; use 1f1b, interleaved, zb-h1 or interlaced",
    ),
    Refusal(
        lambda a: (
            a.vocab_parallel
            and a.mtp_num_layers
            and "m" in (a.pipeline_model_parallel_layout or "").lower().rpartition("|")[0]
        ),
        "--vocab-parallel with --mtp-num-layers needs the heads' layers on the last stage: use a "
        "--pipeline-model-parallel-layout with every m in its last segment, or leave it out",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.mtp_num_layers and a.sequence_parallel,
        "--vocab-parallel with --mtp-num-layers and --sequence-parallel is not supported yet: each head's states "
        "are cut apart; leave --sequence-parallel out",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.mtp_num_layers and a.mtp_detach_heads,
        "--vocab-parallel with --mtp-detach-heads is not supported: all heads train the output layer; leave it out",
    ),
    Refusal(
        lambda a: a.mtp_num_layers and a.vocab_label_smoothing,
        "--vocab-label-smoothing with --mtp-num-layers is not supported: accepted predictions are counted from the "
        "target's logit alone; leave one of them out",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.num_experts,
        "--vocab-parallel with --num-experts is not tested: use a dense model, or leave --vocab-parallel out",
    ),
    Refusal(
        lambda a: a.vocab_parallel and (a.use_megatron_fsdp or a.use_torch_fsdp2),
        "--vocab-parallel with FSDP is not supported: vocabulary gradients go to the buffers of Megatron's own data "
        "parallelism; use --use-distributed-optimizer instead",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.cuda_graph_impl != "none",
        "--vocab-parallel with --cuda-graph-impl {cuda_graph_impl} is not supported: the schedule interleaves streams "
        "that no graph records; use --cuda-graph-impl none",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.overlap_moe_expert_parallel_comm,
        "--vocab-parallel with --overlap-moe-expert-parallel-comm is not supported: both replace the pipeline "
        "schedule; leave one of them out",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.delay_wgrad_compute,
        "--vocab-parallel with --delay-wgrad-compute is not supported: the schedule decides when weight gradients run; "
        "leave --delay-wgrad-compute out",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.defer_embedding_wgrad_compute,
        "--vocab-parallel with --defer-embedding-wgrad-compute is not supported: the output layer's weight gradient is "
        "already a pass of its own; leave --defer-embedding-wgrad-compute out",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.init_model_with_meta_device,
        "--vocab-parallel with --init-model-with-meta-device is not supported: the vocabulary shards are cut from real "
        "weights; leave --init-model-with-meta-device out",
    ),
    Refusal(
        lambda a: a.vocab_parallel and (a.sft or a.dataloader_inter_document_masking),
        "--vocab-parallel with packed sequences (--sft, --dataloader-inter-document-masking) is not supported: every "
        "microbatch must have the same shape; leave these options out",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.perform_rl_step,
        "--vocab-parallel with --perform-rl-step is not supported: it is for pretraining; leave --vocab-parallel out",
    ),
    Refusal(
        lambda a: a.vocab_parallel and (a.logits_save_dir or a.logits_load_dir),
        "--vocab-parallel with --logits-save-dir or --logits-load-dir is not supported: no rank holds whole logits; "
        "leave --vocab-parallel out for distillation",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.fp16_lm_cross_entropy,
        "--vocab-parallel with --fp16-lm-cross-entropy is not supported: softmax statistics are kept in fp32; leave "
        "--fp16-lm-cross-entropy out",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.fp32_residual_connection,
        "--vocab-parallel with --fp32-residual-connection is not supported: the last stage's output travels in the "
        "model's dtype; leave --fp32-residual-connection out",
    ),
    Refusal(
        lambda a: a.vocab_parallel and (a.fp8 or a.fp4),
        "--vocab-parallel with fp8 or fp4 is not tested: use --bf16",
    ),
    Refusal(
        lambda a: (a.vocab_label_smoothing or a.vocab_z_loss) and not a.vocab_parallel,
        "--vocab-label-smoothing and --vocab-z-loss need --vocab-parallel: Megatron's own loss has neither; add "
        "--vocab-parallel with --pipeline-model-parallel-size 2 or more, or leave them out",
    ),
    Refusal(
        lambda a: not 0 <= a.vocab_label_smoothing < 1,
        "--vocab-label-smoothing {vocab_label_smoothing} is not in [0, 1): use the probability that the other tokens "
        "share, 0.1 for example",
    ),
    Refusal(
        lambda a: not 0 <= a.vocab_z_loss < math.inf,
        "--vocab-z-loss {vocab_z_loss} is no coefficient: use a small positive number, 1e-4 for example",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.optimizer not in ("adam", "sgd"),
        "--vocab-parallel with --optimizer {optimizer} is not tested on vocabulary shards: use --optimizer adam",
    ),
    Refusal(
        lambda a: a.core_attention == "sdpa" and a.transformer_impl != "local",
        "--core-attention sdpa with --transformer-impl {transformer_impl} has no effect: Transformer Engine's layers "
        "have an attention of their own; leave one of them out",
    ),
    Refusal(
        lambda a: a.core_attention == "sdpa" and a.reset_attention_mask,
        "--core-attention sdpa with --reset-attention-mask is not supported: the fused kernel knows no document "
        "boundaries; use --core-attention megatron",
    ),
    Refusal(
        lambda a: a.pipeline_trace and not replaces_schedule(a),
        "--pipeline-trace without --vocab-parallel or --pipeline-schedule is not supported: Megatron's own schedule is "
        "not recorded; add one of them, or use --rank-report for each rank's pass times",
    ),
    Refusal(
        lambda a: a.pipeline_trace and a.rank_report and Path(a.pipeline_trace) == Path(a.rank_report),
        "--pipeline-trace and --rank-report both write rank_N.json to {rank_report}: use a folder of its own for each",
    ),
)


class _HelpFormatter(argparse.HelpFormatter):
    """Shows help texts as they stand where argparse cannot fill them in: several of Megatron's have a bare `%`."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            return action.help or ""


class _Parser(argparse.ArgumentParser):
    """Megatron's parser with the configuration file and the platform's flags put before the command line's flags."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message}; `--help` lists all options")

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:
        given = list(sys.argv[1:] if args is None else args)
        given = _from_config(given, self) + given
        chosen = platform_arguments(given, wants_cpu([]))
        if chosen and os.environ.get("RANK", "0") == "0":
            print(f"megatron_vp: chosen for this machine: {' '.join(chosen)}", flush=True)
        # Parts of Megatron parse the command line once more, with a parser that lacks the script's own options.
        sys.argv[1:] = chosen + given
        parsed = super().parse_args(sys.argv[1:], namespace)
        if parsed.yaml_cfg is not None:
            raise UserError(f"--yaml-cfg {parsed.yaml_cfg} bypasses Megatron's checks: use --config FILE.yaml instead")
        return parsed


def _from_config(given: list[str], parser: argparse.ArgumentParser) -> list[str]:
    only_config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    only_config.error = parser.error
    only_config.add_argument("--config", action="append")
    paths = only_config.parse_known_args(given)[0].config
    return [] if paths is None else arguments_from_config(paths, parser)


def _with_ours(original: Callable[..., argparse.ArgumentParser]) -> Callable[..., argparse.ArgumentParser]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        parser.__class__, parser.formatter_class = _Parser, _HelpFormatter
        ours = parser.add_argument_group("vocabulary parallelism and schedules (megatron_vp)")
        ours.add_argument(
            "--config",
            metavar="FILE",
            action="append",
            help="YAML file of long argument names. Given several times, later files win; the command line wins.",
        )
        ours.add_argument(
            "--vocab-parallel", action="store_true", help="Split embedding and output layer over the pipeline ranks."
        )
        ours.add_argument(
            "--vocab-parallel-algorithm",
            choices=ALGORITHMS,
            default="vocab-2",
            help="vocab-2: one barrier a microbatch, one more microbatch in flight; vocab-1: two.",
        )
        ours.add_argument(
            "--vocab-label-smoothing",
            metavar="ALPHA",
            type=float,
            default=0.0,
            help="Train towards 1 - ALPHA for the target and ALPHA / (V - 1) for every other token; with "
            "--vocab-parallel. Evaluation reports the cross entropy.",
        )
        ours.add_argument(
            "--vocab-z-loss",
            metavar="COEFFICIENT",
            type=float,
            default=0.0,
            help="Add COEFFICIENT x (log of the softmax's normaliser) squared to the training loss of every token; "
            "with --vocab-parallel. 1e-4 is usual. Evaluation reports the cross entropy.",
        )
        ours.add_argument(
            "--pipeline-schedule",
            choices=SCHEDULES,
            default="1f1b",
            help="Order of the passes on the pipeline ranks. 1f1b without --vocab-parallel is Megatron's own schedule.",
        )
        ours.add_argument(
            "--core-attention",
            choices=("megatron", "sdpa"),
            default="megatron",
            help="Attention of Megatron's local layers: its own, which writes all scores to memory, or PyTorch's "
            "scaled-dot-product attention (flash attention where the device has it).",
        )
        ours.add_argument(
            "--rank-report",
            metavar="DIR",
            help="Write each pipeline rank's parameters, microbatches in flight and pass times to DIR; plain runs too.",
        )
        ours.add_argument(
            "--pipeline-trace",
            metavar="DIR",
            help="Write start and end of every pass and collective to DIR, a Perfetto file for each pipeline rank; "
            "`megatron-vp trace DIR` merges them.",
        )
        ours.add_argument(
            "--pipeline-trace-iterations",
            metavar="A-B",
            default="3-5",
            help="Training iterations to trace, counted from 1 at the start of the job.",
        )
        return parser

    return add_megatron_arguments


def _with_checks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> Any:
        from megatron_vp.mcore.pipeline_trace import check_trace  # it imports functions that are patched before

        validated = validate(original, args, defaults or {})
        check_inputs(args)
        check_checkpoint(args)
        check_trace(args)
        if args.core_attention == "sdpa":
            patches.apply(patches.group("flash attention"))
        if args.fake_process_group:
            patches.apply(patches.group("replay"))
            args.do_train = True  # rank 0, which has the data, would tell the others
        if args.vocab_parallel:
            _warn_of_one_queue(args)
            patches.apply(patches.group("vocabulary parallelism"))
        if replaces_schedule(args):
            patches.apply(patches.group("pipeline schedule"))
            if args.pipeline_schedule in SPLIT_SCHEDULES:
                patches.apply(patches.group("split backward"))
            if args.pipeline_schedule in V_SHAPED_SCHEDULES:
                patches.apply(patches.group("v-shaped placement"))
        elif args.rank_report is not None:
            patches.apply(patches.group("rank report"))
        _write_resolved(args)
        return validated

    return validate_args


def validate(megatron: Callable[..., Any], args: argparse.Namespace, defaults: dict[str, Any]) -> Any:
    """Validate parsed arguments by Megatron's own function and our refusals; opens no file. Raises UserError."""
    if args.pipeline_schedule in V_SHAPED_SCHEDULES:
        _lay_out_in_a_v(args)
    with refused_by_megatron():
        validated = megatron(args, defaults)
    refuse(args)
    return validated


@contextmanager
def refused_by_megatron() -> Iterator[None]:
    """Turn the assertions and errors by which Megatron rejects arguments into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (AssertionError, ValueError, RuntimeError) as error:
        # Megatron states some conditions without a message; the condition itself is the next best thing.
        said = " ".join(str(error).split()) or f"it requires {traceback.extract_tb(error.__traceback__)[-1].line}"
        raise UserError(f"Megatron refuses these arguments: {said}") from error


def refuse(args: argparse.Namespace) -> None:
    """Raise UserError for the first combination in REFUSALS that `args` (validated by Megatron) asks for."""
    for refusal in REFUSALS:
        if refusal.applies(args):
            raise UserError(refusal.message.format_map(vars(args)))


def _lay_out_in_a_v(args: argparse.Namespace) -> None:
    """Two chunks a rank before Megatron derives anything: the layout string that an even V has, unless one is given."""
    from megatron_vp.mcore.v_layout import even_layout

    chosen = (args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank)
    if any(value is not None for value in chosen):
        raise UserError(
            f"--pipeline-schedule {args.pipeline_schedule} has two chunks a rank by itself: leave "
            f"--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank out"
        )
    hybrid = args.hybrid_layer_pattern is not None or args.hybrid_override_pattern is not None
    if args.pipeline_model_parallel_layout is None and not hybrid and args.num_layers is not None:
        args.pipeline_model_parallel_layout = even_layout(
            args.num_layers, args.pipeline_model_parallel_size, args.mtp_num_layers or 0
        )


def _warn_of_one_queue(args: argparse.Namespace) -> None:
    if args.tensor_model_parallel_size > 1 or args.distributed_backend != "nccl" or args.rank != 0:
        return
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warnings.warn(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one hardware queue: a vocabulary collective that "
            "waits for its peers holds up the passes behind it; unset it, tensor parallelism alone needs it",
            stacklevel=2,
        )


def _write_resolved(args: argparse.Namespace) -> None:
    folder = args.save or args.tensorboard_dir
    if folder is not None and args.rank == 0:
        write_resolved(args, Path(folder) / RESOLVED_NAME)


def _with_room_for_all_tokens(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_padded_vocab_size(args: argparse.Namespace, tokenizer: Any) -> None:
        original(args, tokenizer)
        if args.padded_vocab_size < tokenizer.vocab_size:
            raise UserError(
                f"--padded-vocab-size {args.padded_vocab_size} is smaller than the tokenizer's vocabulary of "
                f"{tokenizer.vocab_size}: use at least that, or leave the option out"
            )

    return set_padded_vocab_size


PATCHES = (
    patches.Patch(
        "megatron.training.arguments:add_megatron_arguments",
        _with_ours,
        "adds --config, --vocab-parallel and --pipeline-schedule, and the flags that the platform needs",
        "(parser)",
    ),
    patches.Patch(
        "megatron.training.arguments:validate_args",
        _with_checks,
        "refuses combinations that cannot work, checks the input files, writes the resolved configuration",
        "(args, defaults={})",
    ),
    patches.Patch(
        "megatron.core.tokenizers.utils.build_tokenizer:_set_padded_vocab_size",
        _with_room_for_all_tokens,
        "refuses a vocabulary smaller than the tokenizer's",
        "(args, tokenizer)",
    ),
)
