"""Jobs of the option survey about training: iterations, batches, evaluation, logging, rates, optimizers, precision."""

from __future__ import annotations

from tests.mcore.case_parts import BOTH, MOE, TENSOR, TIED
from tests.mcore.option_survey.job import FEWER_CHUNKS, HALF, MANY_WAYS, TWO_WAYS, WAYS, Job

BY_SAMPLES = {"train_iters": None, "train_samples": 40}
DECAY = {"lr_decay_style": "WSD", "lr_decay_iters": 5, "lr_wsd_decay_iters": 3, "min_lr": 1e-5}
GROWING = {"step_batch_size_schedule": "0:4 256:8", "global_batch_size": None, **BY_SAMPLES}
_WAITS = "garbage collection and profilers only change times"

LOOP = (
    Job("what every job logs", {"log_world_size_to_tensorboard": True}, MANY_WAYS, default=("zb-h1/none",)),
    Job(
        "throughput and memory logged",
        {"log_throughput": True, "log_memory_interval": 2}
        | {"tensorboard_queue_size": 5, "tensorboard_log_interval": 2, "logging_level": 20},
        TWO_WAYS,
    ),
    Job("loss scale not logged, eight microbatches", {"no_log_loss_scale_to_tensorboard": True, "micro_batch_size": 1}),
    Job(
        "timers to tensorboard",
        {"timing_log_level": 2, "log_timers_to_tensorboard": True, "timing_log_option": "all", "log_throughput": True}
        | {"no_barrier_with_level_1_timing": True},
    ),
    Job("timers of level 1, p = 3", {"timing_log_level": 1, "timing_log_option": "max"}, ranks=3, size=3),
    Job("evaluation from an iteration on", {"start_eval_at_iter": 3, "eval_iters": 2}, MANY_WAYS),
    Job("evaluation in other sizes", {"eval_global_batch_size": 6, "eval_micro_batch_size": 1, "eval_iters": 2}),
    Job("evaluation in other sizes, p = 4", {"eval_global_batch_size": 4, "eval_micro_batch_size": 1}, ranks=4, size=4),
    Job(
        "an iteration skipped",
        {"iterations_to_skip": [4]},
        (*MANY_WAYS, "v-min/vocab-2", "zb-v/none"),
    ),
    Job("iterations skipped, others logged", {"iterations_to_skip": [1, 4], "log_interval": 2}, by_name=True),
    Job("an iteration skipped, p = 3", {"iterations_to_skip": [4]}, ranks=3, size=3),
    Job("an iteration skipped, p = 4, tied", {"iterations_to_skip": [4], **TIED}, ranks=4, size=4),
    Job("an iteration skipped, tensor parallelism", {"iterations_to_skip": [4], **TENSOR}, ranks=4),
    Job(
        "skipped iterations and disabled reruns", {"iterations_to_skip": [2, 3], "rerun_mode": "disabled"}, by_name=True
    ),
    Job("evaluation alone", {"skip_train": True, "eval_iters": 2}, by_name=True),
    Job("evaluation alone, p = 3", {"skip_train": True, "eval_iters": 2, **TIED}, by_name=True, ranks=3, size=3),
    Job(
        "a batch that grows",
        GROWING,
        FEWER_CHUNKS,
        by_name=True,
        why="Megatron does not support this with virtual stages",
    ),
    Job(
        "a batch cut to what the replicas can share",
        {"global_batch_size": 10, "eval_global_batch_size": 8, "decrease_batch_size_if_needed": True},
        by_name=True,
        ranks=4,
    ),
    Job(
        "an exit after three iterations, resumed, checkpoints thinned out",
        {"exit_interval": 3, "save_interval": 1, "save_retain_interval": 2, "exit_on_missing_checkpoint": True},
        then={"exit_interval": None},
    ),
    Job(
        "an exit when the time is up, resumed",
        {"exit_duration_in_mins": -1, "save_interval": 5},
        then={"exit_duration_in_mins": None},
    ),
    Job(
        "an exit when the time is up, p = 3",
        {"exit_duration_in_mins": -1, "save_interval": 5},
        then={"exit_duration_in_mins": 600},
        ranks=3,
        size=3,
    ),
    Job("handlers of a signal to exit", {"exit_signal_handler": True, "exit_signal": "SIGUSR1"}, TWO_WAYS),
    Job("checks of results", {"rerun_mode": "validate_results", "check_for_spiky_loss": True}),
    Job(
        "checks of gradients",
        {"check_for_large_grads": True, "result_rejected_tracker_filename": "{folder}/rejected"},
        TWO_WAYS,
    ),
    Job("no checks", {"rerun_mode": "disabled", "no_check_for_nan_in_loss_and_grad": True}, TWO_WAYS),
    Job(
        "garbage collected by hand, memory emptied, iterations in step",
        {"manual_gc": True, "manual_gc_interval": 2, "no_manual_gc_eval": True, "empty_unused_memory_level": 2}
        | {"train_sync_interval": 2, "deterministic_mode": True, "disable_jit_fuser": True},
        TWO_WAYS,
        why=_WAITS,
    ),
    Job("parameter groups written down", {"dump_param_to_param_group_map": "{folder}/groups.json"}, TWO_WAYS),
    Job(
        "the profiler",
        {"profile": True, "use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 4}
        | {
            "profile_ranks": [0, 1],
            "pytorch_profiler_collect_shapes": True,
            "pytorch_profiler_collect_callstack": True,
        },
        TWO_WAYS,
        why=_WAITS,
    ),
    Job("two log intervals", {"log_interval": 2, "tensorboard_log_interval": 2}, TWO_WAYS, by_name=True),
    Job("another seed, no tests of the loss", {"seed": 4321, "eval_iters": 0}, TWO_WAYS),
)

RATES = (
    Job(
        "WSD by samples, exponential",
        {**BY_SAMPLES, "lr_decay_style": "WSD", "lr_decay_samples": 40, "lr_wsd_decay_samples": 24}
        | {"lr_wsd_decay_style": "exponential", "lr_warmup_samples": 8, "min_lr": 1e-5},
        TWO_WAYS,
    ),
    Job("WSD, linear", {**DECAY, "lr_wsd_decay_style": "linear"}, TWO_WAYS),
    Job("WSD, cosine, p = 3", {**DECAY, "lr_wsd_decay_style": "cosine"}, ranks=3, size=3),
    Job("WSD, minus square root", {**DECAY, "lr_wsd_decay_style": "minus_sqrt", "lr_warmup_iters": 1}, TWO_WAYS),
    Job(
        "inverse square root, warmed up from a rate",
        {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 2, "lr_warmup_init": 1e-4, "lr_decay_iters": 5},
        TWO_WAYS,
    ),
    Job(
        "cosine, warmed up by a fraction",
        {"lr_decay_style": "cosine", "lr_warmup_fraction": 0.3, "min_lr": 1e-4},
        TWO_WAYS,
    ),
    Job("linear, past its end", {"lr_decay_style": "linear", "lr_decay_iters": 4, "min_lr": 1e-4}, TWO_WAYS),
    Job(
        "decoupled rates, weight decay",
        {"decoupled_lr": 2e-3, "decoupled_min_lr": 1e-4, "weight_decay": 5.0, "lr_decay_style": "linear"}
        | {"lr_warmup_fraction": 0.3},
        MANY_WAYS,
    ),
    Job("decoupled rates, p = 3, tied", {"decoupled_lr": 2e-3, **TIED}, ranks=3, size=3),
    Job("decoupled rates, p = 4", {"decoupled_lr": 2e-3, "decoupled_min_lr": 1e-4}, ranks=4, size=4),
    Job(
        "SGD, weight decay that grows by cosine, little clipped",
        {"optimizer": "sgd", "sgd_momentum": 0.5, "clip_grad": 0.05, "weight_decay_incr_style": "cosine"}
        | {"start_weight_decay": 0.0, "end_weight_decay": 2.0, "lr": 0.1},
        by_name=True,
        why="Megatron cannot load the state of SGD",
    ),
    Job(
        "weight decay that grows linearly",
        {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0} | {"end_weight_decay": 2.0},
        TWO_WAYS,
    ),
    Job(
        "Adam's betas, weight decay of norms of queries and keys",
        {"adam_beta1": 0.8, "adam_beta2": 0.95, "weight_decay": 2.0, "apply_wd_to_qk_layernorm": True}
        | {"qk_layernorm": True, "normalization": "RMSNorm"},
    ),
    Job(
        "no weight decay by a condition",
        {"no_weight_decay_cond_type": "apply_wd_to_qk_layernorm", "qk_layernorm": True, "weight_decay": 2.0}
        | {"normalization": "RMSNorm"},
        TWO_WAYS,
    ),
    Job("gradients not clipped, no weight decay", {"clip_grad": 0.0, "weight_decay": 0.0}, TWO_WAYS),
    Job("little clipped, p = 4", {"clip_grad": 0.05}, ranks=4, size=4),
)

PRECISION = (
    Job(
        "bf16",
        {"bf16": True},
        bound=HALF,
        but=("num-zeros", "num zeros"),
        why="16-bit values have rounding errors of 4e-3",
    ),
    Job(
        "bf16, gradients accumulated and reduced in fp32",
        {"bf16": True, "accumulate_allreduce_grads_in_fp32": True, "attention_softmax_in_fp32": True}
        | {"disable_bf16_reduced_precision_matmul": True},
        bound=HALF,
        but=("num-zeros", "num zeros"),
        why="16-bit values have rounding errors of 4e-3",
    ),
    Job(
        "fp16, scaled query-key products, off-by-one softmax, MLP in chunks",
        {"fp16": True, "initial_loss_scale": 1024, "apply_query_key_layer_scaling": True, "softmax_type": "off-by-one"}
        | {"mlp_chunks_for_training": 2, "attention_softmax_in_fp32": True},
        bound=HALF,
        but=("num-zeros", "num zeros"),
        why="16-bit values have rounding errors of 5e-4",
    ),
    Job(
        "fp16, a scale that moves",
        {"fp16": True, "initial_loss_scale": 2**24, "min_loss_scale": 4, "loss_scale_window": 2, "hysteresis": 1},
        bound=HALF,
        but=("num-zeros", "num zeros"),
        by_name=True,
        why="16-bit values have rounding errors of 5e-4; the first iterations overflow and are skipped",
    ),
    Job(
        "fp16, a fixed scale",
        {"fp16": True, "loss_scale": 512},
        TWO_WAYS,
        bound=HALF,
        but=("num-zeros", "num zeros"),
        why="16-bit values have rounding errors of 5e-4",
    ),
    Job(
        "bf16, gradients reduced with fp32 accumulation",
        {"bf16": True, "grad_reduce_in_bf16": True, "ddp_reduce_scatter_with_fp32_accumulation": True, **BOTH}
        | {"dist_ckpt_optim_fully_reshardable": True},
        ranks=4,
        bound=HALF,
        but=("num-zeros", "num zeros"),
        why="16-bit values have rounding errors of 4e-3",
    ),
    Job(
        "experts in bf16, p = 4",
        {**MOE, "bf16": True},
        ranks=4,
        size=4,
        bound=HALF,
        but=("num-zeros", "num zeros"),
        why="16-bit values have rounding errors of 4e-3, which can change the experts of tokens with similar scores",
    ),
    Job(
        "fp32 norms and products fused where a device has them",
        {"no_persist_layer_norm": True, "norm_epsilon": 1e-6},
        WAYS,
    ),
)
