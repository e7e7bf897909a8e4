"""The table of refusals: every combination of validated arguments that cannot work or that no test covers."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from megatron.core.utils import get_te_version, is_te_min_version

from megatron_vp.errors import Reasons, UserError
from megatron_vp.jobs.job_config import ALGORITHM_ALONE
from megatron_vp.jobs.layout_text import stages_behind_mtp
from megatron_vp.jobs.virtual_stages import SHIFTED_V, shifts_given
from megatron_vp.jobs.vocab_shards import EVEN_ALONE, NEEDS_VOCAB_PARALLEL, ShardChoice, ShardRule
from megatron_vp.mcore.model.delayed_weights import MINIMUM_VERSION
from megatron_vp.mcore.options.refusal import Refusal
from megatron_vp.mcore.options.refused_files import FILE_REFUSALS, file_words
from megatron_vp.mcore.options.refused_lengths import LENGTH_REFUSALS
from megatron_vp.mcore.options.refused_offload import OFFLOAD_REFUSALS
from megatron_vp.mcore.options.refused_options import REFUSED_OPTIONS
from megatron_vp.mcore.options.refused_packing import PACKING_REFUSALS, REFUSED_PACKING
from megatron_vp.mcore.options.refused_precision import REFUSED_PRECISION, UNSAFE_STATE, cannot_resume
from megatron_vp.mcore.options.vocab_rows import needs_even_shards
from megatron_vp.mcore.platform.installed import installed
from megatron_vp.mcore.settled import run_settings, words
from megatron_vp.schedule import VocabMethod
from megatron_vp.trace.rank_files import path_of


def _mtp_rank_holds_rows(a: argparse.Namespace) -> bool:
    """Whether the rank of the MTP layers holds vocabulary rows. The ranks of the first and the last stage, which join
    the vocabulary collectives in any case, need none.
    """
    placement = run_settings(a).placement(a.pipeline_model_parallel_size, a.virtual_pipeline_model_parallel_size or 1)
    rank = placement.rank_of(placement.stages - 1 - stages_behind_mtp(a.pipeline_model_parallel_layout or ""))
    return a.vocab_rows is None or a.vocab_rows[rank] > 0 or rank in placement.vocab_members(())


def _keeps_layers(a: argparse.Namespace) -> bool:
    """Whether one of our schedules runs with Megatron's own vocabulary layers."""
    return run_settings(a).replaces_schedule and not a.vocab_parallel


def _delays_weights(a: argparse.Namespace) -> bool:
    """Whether pass W computes the weight gradients of Transformer Engine's layers."""
    return run_settings(a).splits_backward and a.transformer_impl == "transformer_engine"


def _dense_ranks(a: argparse.Namespace) -> int:
    """The number of ranks that jointly compute a layer, except its experts."""
    return a.tensor_model_parallel_size * a.context_parallel_size


def _expert_ranks(a: argparse.Namespace) -> int:
    """The number of ranks that jointly compute a layer's experts."""
    return a.expert_model_parallel_size * (a.expert_tensor_parallel_size or a.tensor_model_parallel_size)


def _has_more_ranks(folder: str | None, a: argparse.Namespace) -> bool:
    return folder is not None and path_of(Path(folder), a.pipeline_model_parallel_size).exists()


OUR_SCHEDULE = "--vocab-parallel or --pipeline-schedule {pipeline_schedule}"
"""The flags that select one of our schedules. In a message, the flag that the user gave replaces {our_schedule}."""


ELEMENT_BY_ELEMENT = ("adam", "sgd")
"""Optimizers that update each element of a weight independently of the other elements. Megatron takes all other
optimizers from the package emerging-optimizers.
"""
STEPS_VOCABULARY_SO = (*ELEMENT_BY_ELEMENT, "muon", "lion", "soap")
"""Choices of --optimizer that update the vocabulary layers element by element: Megatron updates these layers with Adam,
SGD or Lion, even under muon and soap. A shard is then updated exactly like the same rows of an unsharded layer.
Adaptive Muon is not listed, because it fails in its first step in Megatron 0.19.
"""

# In a message, {name} stands for the value of the argument `name`.
REFUSALS = (
    Refusal(
        lambda a: a.tokenizer_type in ("NullTokenizer", "NullMultimodalTokenizer") and a.vocab_size is None,
        "--tokenizer-type {tokenizer_type} has no vocabulary of its own: add --vocab-size with the number of tokens",
    ),
    Refusal(
        lambda a: a.eval_interval is None and not a.full_validation and not a.skip_train,
        "--eval-interval is missing, so Megatron cannot compute how many samples evaluation uses: set it to the number "
        "of iterations between two evaluations (with --eval-iters 0, Megatron skips the evaluations)",
    ),
    *LENGTH_REFUSALS,
    Refusal(
        lambda a: a.group_query_attention and a.num_attention_heads % (a.num_query_groups or 1),
        "--num-attention-heads {num_attention_heads} is not divisible by --num-query-groups {num_query_groups}: use a "
        "number of groups that divides the number of heads",
    ),
    Refusal(
        lambda a: VocabMethod.NONE not in run_settings(a).family.methods and not a.vocab_parallel,
        "--pipeline-schedule {pipeline_schedule} has vocabulary passes, which need --vocab-parallel: add "
        "--vocab-parallel, or use --pipeline-schedule 1f1b",
    ),
    *FILE_REFUSALS,
    *OFFLOAD_REFUSALS,
    *PACKING_REFUSALS,
    Refusal(
        lambda a: _keeps_layers(a) and a.pipeline_model_parallel_size < 2,
        "--pipeline-schedule {pipeline_schedule} with one pipeline stage has nothing to order: use "
        "--pipeline-model-parallel-size 2 or more, or leave --pipeline-schedule out",
    ),
    Refusal(
        lambda a: (
            _keeps_layers(a) and run_settings(a).last_stage_elsewhere and not a.untie_embeddings_and_output_weights
        ),
        "--pipeline-schedule {pipeline_schedule} with tied embeddings and without --vocab-parallel is not supported: "
        "both chunks of the first rank would hold the tied weight; add --vocab-parallel or "
        "--untie-embeddings-and-output-weights, or use zb-h1",
    ),
    Refusal(
        lambda a: _keeps_layers(a) and run_settings(a).last_stage_elsewhere and a.mtp_num_layers,
        "--pipeline-schedule {pipeline_schedule} with --mtp-num-layers and without --vocab-parallel is not supported: "
        "the first rank would hold both its own word embedding and the copy for the prediction heads; add "
        "--vocab-parallel, or use zb-h1 or interleaved",
    ),
    *(
        Refusal(
            lambda a, given=option.given: run_settings(a).replaces_schedule and given(a),
            f"{{our_schedule}} with {option.name} is not supported: {option.why}; {option.instead}, or use Megatron's "
            "own schedule (1f1b without --vocab-parallel)",
        )
        for option in (*REFUSED_OPTIONS, *REFUSED_PRECISION, *REFUSED_PACKING)
    ),
    Refusal(
        lambda a: run_settings(a).splits_backward and a.transformer_impl not in ("local", "transformer_engine"),
        "--pipeline-schedule {pipeline_schedule} with --transformer-impl {transformer_impl} is not supported: pass W "
        "can compute weight gradients only for Transformer Engine's layers and Megatron's local layers; use "
        "--transformer-impl transformer_engine or local, or use 1f1b",
    ),
    Refusal(
        lambda a: _delays_weights(a) and not is_te_min_version(MINIMUM_VERSION),
        f"--pipeline-schedule {{pipeline_schedule}} needs Transformer Engine {MINIMUM_VERSION} or newer, whose layers "
        "can delay weight gradients until pass W, but {transformer_engine_version} is installed: update Transformer "
        "Engine, add --transformer-impl local, or use 1f1b",
    ),
    *(
        Refusal(
            lambda a, asks=asks: _delays_weights(a) and asks(a),
            f"--pipeline-schedule {{pipeline_schedule}} with {option} is not supported: {why}; leave {option} out, or "
            f"use 1f1b",
        )
        for option, why, asks in (
            (
                "--tp-comm-overlap",
                "Transformer Engine does not delay the weight gradients of layers that overlap their communication",
                lambda a: a.tp_comm_overlap,
            ),
            (
                "--use-transformer-engine-op-fuser",
                "Transformer Engine's fused linear operations do not delay their weight gradients",
                lambda a: a.use_transformer_engine_op_fuser,
            ),
            (
                "--use-grouped-gemm-for-shared-expert",
                "pass W reads the queues of Transformer Engine's layers, but the fused operation of the shared expert "
                "puts its weight gradients into queues of its own",
                lambda a: a.use_grouped_gemm_for_shared_expert,
            ),
        )
    ),
    Refusal(
        lambda a: _delays_weights(a) and (a.moe_single_grouped_weight or a.moe_single_grouped_bias),
        "--pipeline-schedule {pipeline_schedule} with --moe-single-grouped-weight or --moe-single-grouped-bias is not "
        "supported: weight gradients can be delayed only if each expert has its own parameters; leave these options "
        "out, or use 1f1b",
    ),
    Refusal(
        lambda a: (a.fp8 or a.fp4) and a.transformer_impl == "local",
        "--fp8-format or --fp4-format with --transformer-impl local has no effect: Megatron's local layers compute in "
        "the model's dtype; leave the format out, or use --transformer-impl transformer_engine",
    ),
    Refusal(
        lambda a: (a.fp8_param_gather or a.fp4_param_gather) and not (a.bf16 or a.fp16),
        "--fp8-param-gather or --fp4-param-gather without --bf16 or --fp16 cannot train: Transformer Engine's "
        "optimizer supports fp8 and fp4 weights only together with master weights; add --bf16",
    ),
    Refusal(
        cannot_resume,
        "--fp8-recipe delayed cannot resume from a checkpoint: Transformer Engine {transformer_engine_version} loads "
        f"the scaling factors only if {UNSAFE_STATE}=1 is set; set it on every rank if you trust the checkpoints, or "
        "use another --fp8-recipe",
    ),
    Refusal(
        lambda a: (
            (a.mtp_num_layers or 0) > 1
            and a.mtp_use_repeated_layer
            and a.gradient_accumulation_fusion
            and a.transformer_impl != "local"
        ),
        "--mtp-use-repeated-layer with fused accumulation of weight gradients loses gradients: in the first "
        "microbatch, each use of Transformer Engine's layer overwrites the gradients that its other uses have added; "
        "add --no-gradient-accumulation-fusion",
    ),
    Refusal(
        lambda a: a.defer_embedding_wgrad_compute and not installed().apex_accumulation,
        "--defer-embedding-wgrad-compute needs Apex's fused_weight_gradient_mlp_cuda, which is not installed: leave "
        "the option out, or build Apex with APEX_CPP_EXT=1 APEX_CUDA_EXT=1",
    ),
    Refusal(
        lambda a: not a.vocab_parallel and "vocab_parallel_algorithm" in words().options,
        ALGORITHM_ALONE,
    ),
    Refusal(
        lambda a: not a.vocab_parallel and ShardChoice.parse(a.vocab_shards).rule is not ShardRule.BALANCED,
        NEEDS_VOCAB_PARALLEL,
    ),
    Refusal(lambda a: a.vocab_rows is not None and needs_even_shards(run_settings(a)), EVEN_ALONE),
    Refusal(
        lambda a: a.vocab_parallel and a.pipeline_model_parallel_size < 2,
        "--vocab-parallel with one pipeline stage has nothing to split: use --pipeline-model-parallel-size 2 or more, "
        "or leave --vocab-parallel out",
    ),
    Refusal(
        lambda a: (
            run_settings(a).replaces_schedule
            and a.virtual_pipeline_model_parallel_size is not None
            and run_settings(a).family.chunks == 1
        ),
        "--pipeline-schedule {pipeline_schedule} has one chunk per rank, but this job asks for more: use "
        "--pipeline-schedule interleaved, or leave out the options that create virtual pipeline stages "
        "(--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank, or a layout with more "
        "segments than ranks)",
    ),
    Refusal(
        lambda a: run_settings(a).family.chunks is None and (a.virtual_pipeline_model_parallel_size or 1) < 2,
        "--pipeline-schedule {pipeline_schedule} needs at least two chunks per rank: add "
        "--num-virtual-stages-per-pipeline-rank 2 or, for a hybrid model, use a --hybrid-layer-pattern with two or "
        "more segments per rank",
    ),
    Refusal(
        lambda a: run_settings(a).places_chunks and shifts_given(vars(a)),
        SHIFTED_V,
    ),
    Refusal(
        lambda a: (
            (run_settings(a).family.chunks or 1) > 1
            and a.virtual_pipeline_model_parallel_size != run_settings(a).family.chunks
        ),
        "--pipeline-schedule {pipeline_schedule} has {own_chunks} chunks per rank: leave "
        "--pipeline-model-parallel-layout out, or give it {own_chunks} segments per rank (for a hybrid model, do so in "
        "--hybrid-layer-pattern)",
    ),
    Refusal(
        lambda a: a.mtp_num_layers and a.hybrid_layer_pattern and run_settings(a).last_stage_elsewhere,
        "--pipeline-schedule {pipeline_schedule} with a hybrid model that has several prediction heads is not "
        "supported: Megatron builds the heads on the last rank, but the last stage of a V shape is on the first rank; "
        "use 1f1b, interleaved, zb-h1 or interlaced",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.mtp_num_layers and not _mtp_rank_holds_rows(a),
        "--vocab-shards without rows for the rank of the MTP layers is not supported if a later stage computes the "
        "loss: change --vocab-shards, or put every m of --pipeline-model-parallel-layout into its last segment",
    ),
    Refusal(
        lambda a: (
            a.vocab_parallel and a.mtp_num_layers and a.hybrid_layer_pattern and "/" not in a.hybrid_layer_pattern
        ),
        "--vocab-parallel with --mtp-num-layers and a --hybrid-layer-pattern without heads is not supported: Megatron "
        "builds no prediction heads from such a pattern; append a slash and the layers of each head (*-|*-/*-), or "
        "leave --mtp-num-layers out",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.mtp_num_layers and a.mtp_detach_heads,
        "--vocab-parallel with --mtp-detach-heads is not supported: every prediction head trains the sharded output "
        "layer; leave --mtp-detach-heads out",
    ),
    Refusal(
        lambda a: a.mtp_num_layers and a.vocab_label_smoothing,
        "--vocab-label-smoothing with --mtp-num-layers is not supported: with label smoothing, the acceptance rate of "
        "the prediction heads cannot be computed; leave one of the two options out",
    ),
    Refusal(
        lambda a: (
            a.distributed_backend == "gloo" and a.num_distributed_optimizer_instances > 1 and a.overlap_grad_reduce
        ),
        "--num-distributed-optimizer-instances {num_distributed_optimizer_instances} with --overlap-grad-reduce and "
        "--distributed-backend gloo is not supported: Megatron orders the two gradient reductions with a CUDA stream, "
        "without which gradients are wrong; leave --overlap-grad-reduce out",
    ),
    Refusal(
        lambda a: run_settings(a).last_stage_elsewhere and a.reset_attention_mask,
        "--pipeline-schedule {pipeline_schedule} with --reset-attention-mask is not supported: only the first and the "
        "last stage get masks, and a V shape has more stages; use --dataloader-inter-document-masking, which works in "
        "every stage (with --transformer-impl local, add --core-attention sdpa)",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.init_model_with_meta_device,
        "--vocab-parallel with --init-model-with-meta-device is not supported: the vocabulary shards are cut from real "
        "weights; leave --init-model-with-meta-device out",
    ),
    Refusal(
        lambda a: (a.vocab_parallel or run_settings(a).places_chunks) and a.ckpt_format == "torch" and a.save,
        "{our_schedule} with --ckpt-format torch is not supported: in this format, a checkpoint has one file per rank, "
        "so only a run with the same schedule and number of ranks can load it; use --ckpt-format torch_dist, which "
        "every run can load, or leave --save out",
    ),
    Refusal(
        lambda a: (a.vocab_parallel or run_settings(a).places_chunks) and a.ckpt_convert_format == "torch",
        "{our_schedule} with --ckpt-convert-format torch is not supported: in this format, a checkpoint has one file "
        "per rank, so only a run with the same schedule and number of ranks can load it; convert the checkpoint in a "
        "run with neither --vocab-parallel nor --pipeline-schedule",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.fp16_lm_cross_entropy,
        "--vocab-parallel with --fp16-lm-cross-entropy is not supported: softmax statistics are kept in fp32; leave "
        "--fp16-lm-cross-entropy out",
    ),
    Refusal(
        lambda a: (a.vocab_label_smoothing or a.vocab_z_loss) and not a.vocab_parallel,
        "--vocab-label-smoothing and --vocab-z-loss need --vocab-parallel: Megatron's own loss has neither; add "
        "--vocab-parallel with --pipeline-model-parallel-size 2 or more, or leave both out",
    ),
    Refusal(
        lambda a: not 0 <= a.vocab_label_smoothing < 1,
        "--vocab-label-smoothing {vocab_label_smoothing} is not in [0, 1): use the total probability of all tokens "
        "other than the target, such as 0.1",
    ),
    Refusal(
        lambda a: not 0 <= a.vocab_z_loss < math.inf,
        "--vocab-z-loss {vocab_z_loss} is not a valid coefficient: use a small positive number, such as 1e-4",
    ),
    Refusal(
        lambda a: a.vocab_parallel and a.optimizer not in STEPS_VOCABULARY_SO,
        "--vocab-parallel with --optimizer {optimizer} is not supported: this optimizer was not tested on vocabulary "
        f"shards; use --optimizer {', '.join(STEPS_VOCABULARY_SO[:-1])} or {STEPS_VOCABULARY_SO[-1]}",
    ),
    Refusal(
        lambda a: a.optimizer not in ELEMENT_BY_ELEMENT and not installed().emerging_optimizers,
        "--optimizer {optimizer} needs the package emerging-optimizers, which is not installed: run `pip install "
        "emerging-optimizers`, or use --optimizer adam",
    ),
    Refusal(
        lambda a: a.optimizer not in ELEMENT_BY_ELEMENT and a.fp16,
        "--optimizer {optimizer} with --fp16 cannot train: Megatron does not scale the loss for this optimizer; use "
        "--bf16",
    ),
    Refusal(
        lambda a: a.use_layer_wise_distributed_optimizer and not (a.bf16 or a.fp16),
        "--optimizer {optimizer} with --use-distributed-optimizer and without --bf16 cannot train: Megatron's "
        "layer-wise optimizer supports only 16-bit weights with master weights; add --bf16, or leave "
        "--use-distributed-optimizer out",
    ),
    Refusal(
        lambda a: (
            a.use_layer_wise_distributed_optimizer
            and (a.num_distributed_optimizer_instances > 1 or a.overlap_param_gather_with_optimizer_step)
        ),
        "--optimizer {optimizer} with --use-distributed-optimizer and --num-distributed-optimizer-instances or "
        "--overlap-param-gather-with-optimizer-step cannot work: Megatron's layer-wise optimizer supports neither of "
        "the last two options; leave both out",
    ),
    Refusal(
        lambda a: (
            a.context_parallel_size > 1
            and a.transformer_impl == "local"
            and a.core_attention == "megatron"
            and a.hybrid_layer_pattern is None
        ),
        "--context-parallel-size {context_parallel_size} with --transformer-impl local and --core-attention megatron "
        "cannot work: Megatron's local attention needs whole sequences; use --core-attention sdpa",
    ),
    Refusal(
        lambda a: (
            a.multi_latent_attention
            and a.transformer_impl == "local"
            and a.core_attention == "megatron"
            and a.hybrid_layer_pattern is None
        ),
        "--multi-latent-attention with --transformer-impl local and --core-attention megatron cannot work: Megatron's "
        "local attention requires keys and values of the same size; use --core-attention sdpa, or --transformer-impl "
        "transformer_engine",
    ),
    Refusal(
        lambda a: (
            a.multi_latent_attention and a.transformer_impl == "local" and a.qk_layernorm and a.q_lora_rank is None
        ),
        "--qk-layernorm and --multi-latent-attention without --q-lora-rank cannot work with --transformer-impl local: "
        "Megatron's local layers normalise only compressed queries; add --q-lora-rank, or leave --qk-layernorm out",
    ),
    Refusal(
        lambda a: (
            a.layernorm_zero_centered_gamma
            and a.transformer_impl == "local"
            and (a.normalization != "LayerNorm" or not installed().apex)
        ),
        "--apply-layernorm-1p with --transformer-impl local and --normalization {normalization} cannot work: among "
        "the norms of Megatron's local layers, only Apex's LayerNorm supports zero-centered weights; leave "
        "--apply-layernorm-1p out, or use --transformer-impl transformer_engine",
    ),
    Refusal(
        lambda a: a.num_distributed_optimizer_instances > 1 and not installed().einops,
        "--num-distributed-optimizer-instances {num_distributed_optimizer_instances} needs the package einops, which "
        "is not installed: run `pip install einops`, or leave the option out",
    ),
    Refusal(
        lambda a: a.use_tp_pp_dp_mapping and a.pipeline_model_parallel_size > 1 and _expert_ranks(a) != _dense_ranks(a),
        "--use-tp-pp-dp-mapping cannot work: with --pipeline-model-parallel-size {pipeline_model_parallel_size}, "
        "Megatron needs tensor times context parallelism to equal expert times expert tensor parallelism; leave the "
        "option out",
    ),
    Refusal(
        lambda a: a.core_attention == "sdpa" and a.transformer_impl != "local",
        "--core-attention sdpa with --transformer-impl {transformer_impl} has no effect: Transformer Engine's layers "
        "have their own attention; leave one of the two options out",
    ),
    Refusal(
        lambda a: a.core_attention == "sdpa" and (a.softmax_type != "vanilla" or a.window_size is not None),
        "--core-attention sdpa with --softmax-type or --window-size is not supported: PyTorch's attention supports "
        "only the plain softmax over all earlier positions; use --core-attention megatron",
    ),
    Refusal(
        lambda a: a.core_attention == "sdpa" and a.reset_attention_mask,
        "--core-attention sdpa with --reset-attention-mask is not supported: the fused kernel takes no masks; use "
        "--dataloader-inter-document-masking",
    ),
    Refusal(
        lambda a: a.num_experts and a.tensor_model_parallel_size > 1 and not (a.sequence_parallel or a.skip_train),
        "--num-experts with --tensor-model-parallel-size {tensor_model_parallel_size} and without --sequence-parallel "
        "cannot train: Megatron's experts fail in their first forward pass; add --sequence-parallel",
    ),
    Refusal(
        lambda a: a.init_method_xavier_uniform,
        "--init-method-xavier-uniform cannot work: Megatron sets a field for it that its own configuration class "
        "does not accept; use --init-method-std",
    ),
    Refusal(
        lambda a: a.rerun_mode == "report_stats",
        "--rerun-mode report_stats cannot work: Megatron lists this mode but does not implement it; use "
        "validate_results or disabled",
    ),
    Refusal(
        lambda a: a.full_validation != a.multiple_validation_sets,
        "--full-validation and --multiple-validation-sets cannot work without each other: Megatron fails in the "
        "first evaluation or before it; use both, even for a single validation set, or neither",
    ),
    Refusal(
        lambda a: a.full_validation and a.pipeline_model_parallel_size > 1 and a.eval_micro_batch_size != 1,
        "--full-validation with --pipeline-model-parallel-size {pipeline_model_parallel_size} and an evaluation micro "
        "batch of {eval_micro_batch_size} cannot work: Megatron reads one sequence at a time in a full "
        "validation; use --eval-micro-batch-size 1",
    ),
    Refusal(
        lambda a: a.validation_set_names and not a.multiple_validation_sets,
        "--validation-set-names cannot work without --multiple-validation-sets: Megatron fails in the first "
        "evaluation; add --full-validation and --multiple-validation-sets, or leave --validation-set-names out",
    ),
    Refusal(
        lambda a: not a.pad_vocab_size and a.padded_vocab_size is None,
        "--no-pad-vocab-size cannot work without --padded-vocab-size: Megatron then does not know the vocabulary "
        "size; use --make-vocab-size-divisible-by 1 to pad as little as the ranks allow",
    ),
    Refusal(
        lambda a: a.log_pipeline_interval and not (a.tensorboard_dir or a.wandb_project),
        "--log-pipeline-interval {log_pipeline_interval} without --tensorboard-dir or --wandb-project has no effect: "
        "add one of the two",
    ),
    Refusal(
        lambda a: a.pipeline_trace and a.rank_report and Path(a.pipeline_trace) == Path(a.rank_report),
        "--pipeline-trace and --rank-report both write rank_N.json to {rank_report}: use a different folder for each",
    ),
    Refusal(
        lambda a: _has_more_ranks(a.rank_report, a),
        "--rank-report {rank_report} holds reports of a run with more pipeline ranks, which would mix with this run's: "
        "use another folder, or delete them",
    ),
    Refusal(
        lambda a: _has_more_ranks(a.pipeline_trace, a),
        "--pipeline-trace {pipeline_trace} holds traces of a run with more pipeline ranks, which would mix with this "
        "run's: use another folder, or delete them",
    ),
)


def refuse(args: argparse.Namespace) -> None:
    """Raise one UserError that lists every combination in REFUSALS that the validated arguments contain."""
    reasons = Reasons()
    asked = "--vocab-parallel" if args.vocab_parallel else f"--pipeline-schedule {args.pipeline_schedule}"
    for refusal in REFUSALS:
        with reasons.collected():
            if refusal.applies(args):
                found = {
                    "transformer_engine_version": get_te_version(),
                    "our_schedule": asked,
                    "own_chunks": "two" if run_settings(args).family.chunks == 2 else run_settings(args).family.chunks,
                    **file_words(args),
                    **vars(args),
                }
                raise UserError(refusal.message.format_map(found))
    reasons.refuse()
