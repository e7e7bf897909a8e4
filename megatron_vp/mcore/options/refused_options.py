"""Megatron options that none of our schedules supports, with or without --vocab-parallel."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_vp.mcore.settled import run_settings


@dataclass(frozen=True)
class RefusedOption:
    """A refused option, and the parts of its error message.

    name: the option's name in the message, with {names} filled from the arguments. given: whether the arguments contain
        the option. why: the reason. instead: the remedy, apart from using Megatron's own schedule.
    """

    name: str
    given: Callable[[argparse.Namespace], Any]
    why: str
    instead: str = "leave that option out"


REFUSED_OPTIONS = (
    RefusedOption(
        "FSDP",
        lambda a: a.use_megatron_fsdp or a.use_torch_fsdp2,
        "our passes write gradients into the buffers of Megatron's own data parallelism",
        "use --use-distributed-optimizer instead",
    ),
    RefusedOption(
        "--cuda-graph-impl {cuda_graph_impl}",
        lambda a: a.cuda_graph_impl in ("local", "transformer_engine") and run_settings(a).splits_backward,
        "replaying a CUDA graph of pass B runs no Python code that could store what pass W needs, and a graph of B "
        "cannot contain W, which runs several microbatches later",
        "use --cuda-graph-impl none",
    ),
    RefusedOption(
        "--cuda-graph-impl {cuda_graph_impl} and a growing batch size",
        lambda a: a.cuda_graph_impl in ("local", "transformer_engine") and a.step_batch_size_schedule,
        "CUDA graphs are captured only once, for a fixed number of microbatches",
        "use --cuda-graph-impl none or a constant batch size",
    ),
    RefusedOption(
        "--cuda-graph-impl local and a different batch size for evaluation",
        lambda a: (
            a.cuda_graph_impl == "local"
            and (
                a.eval_global_batch_size not in (None, a.global_batch_size)
                or a.eval_micro_batch_size not in (None, a.micro_batch_size)
            )
        ),
        "an evaluation replays the CUDA graphs of training, one per microbatch, so after an evaluation with more or "
        "fewer microbatches, training would continue with the graph of the wrong microbatch",
        "leave --eval-global-batch-size and --eval-micro-batch-size out",
    ),
    RefusedOption(
        "--cuda-graph-impl full_iteration",
        lambda a: a.cuda_graph_impl == "full_iteration",
        "a CUDA graph cannot capture an iteration in which the host checks the device's progress or reads token counts",
        "use --cuda-graph-impl none",
    ),
    RefusedOption(
        "--overlap-moe-expert-parallel-comm",
        lambda a: a.overlap_moe_expert_parallel_comm,
        "Megatron overlaps expert communication only in its own schedules",
    ),
    RefusedOption(
        "--delay-wgrad-compute or --overlap-dispatch-backward-with-experts-wgrad",
        lambda a: a.delay_wgrad_compute or a.overlap_dispatch_backward_with_experts_wgrad,
        "the schedule decides when weight gradients are computed",
        "leave them out",
    ),
    RefusedOption(
        "--hybrid-context-parallel", lambda a: a.hybrid_context_parallel, "every microbatch must have the same shape"
    ),
    RefusedOption(
        "--perform-rl-step", lambda a: a.perform_rl_step, "our schedules do not support reinforcement learning"
    ),
    RefusedOption(
        "--logits-save-dir or --logits-load-dir",
        lambda a: a.logits_save_dir or a.logits_load_dir,
        "Megatron takes the logits from each rank's last chunk, and with --vocab-parallel no rank holds all logits",
        "leave them out",
    ),
    RefusedOption(
        "--output-logit-dtype",
        lambda a: getattr(a, "logit_dtype", None) is not None,  # Megatron 0.19 does not have this option.
        "with --vocab-parallel or a schedule that has W passes, logits are computed in the model's dtype",
    ),
    RefusedOption(
        "--mtp-hsm",
        lambda a: getattr(a, "mtp_hsm", False),  # Megatron 0.19 does not have this option.
        "this option mixes hidden states at random, which has not been tested under our schedules",
    ),
    RefusedOption(
        "--fp32-residual-connection",
        lambda a: a.fp32_residual_connection,
        "stages and vocabulary layers exchange tensors in the model's dtype",
    ),
    RefusedOption(
        "--moe-paged-stash or --moe-expert-rank-capacity-factor",
        lambda a: a.moe_paged_stash or a.moe_expert_rank_capacity_factor is not None,
        "only Megatron's own schedules repeat an iteration in which experts overflow",
        "leave them out",
    ),
    RefusedOption(
        "--tensor-parallel-num-weight-shards or --expert-tensor-parallel-num-weight-shards",
        lambda a: a.gtp_weight_remat_size * a.expert_gtp_weight_remat_size > 1,
        "weight shards are gathered before each use, which works only in the pass order of Megatron's own schedules",
        "leave them out",
    ),
    RefusedOption(
        "--moe-use-upcycling",
        lambda a: a.moe_use_upcycling,
        "upcycling builds a dense model and an MoE model, but our code can prepare only one model per run",
        "upcycle the checkpoint in a run with neither --vocab-parallel nor --pipeline-schedule, and load the result",
    ),
    RefusedOption(
        "--freeze-all-layers",
        lambda a: a.freeze_all_layers,
        "an iteration would have no backward passes to schedule",
    ),
    RefusedOption(
        "--log-straggler",
        lambda a: a.log_straggler,
        "this option times forward_step, which does not run the model under our schedules",
        "use --rank-report or --pipeline-trace for each rank's pass times",
    ),
    RefusedOption(
        "--inprocess-restart",
        lambda a: a.inprocess_restart,
        "a restart does not rebuild this plug-in's communicators",
        "leave the option out, and let the launcher restart the ranks",
    ),
    RefusedOption(
        "--fine-grained-activation-offloading",
        lambda a: a.fine_grained_activation_offloading,
        "Megatron's offloading relies on the order of passes in Megatron's own schedules",
        "use --offload-chunks",
    ),
)
