"""Refusals that concern a run's length, its learning rate and loss scale, and options that name single iterations.

Most of the refused settings would also fail Megatron's assertions, but on every rank and only after the model is built.
"""

from __future__ import annotations

import argparse

from megatron_vp.mcore.options.refusal import Refusal
from megatron_vp.mcore.storage.optimizer_check import learning_course


def _has_end(a: argparse.Namespace) -> bool:
    return bool(a.train_iters or a.train_samples)


def _anneals(a: argparse.Namespace) -> bool:
    """Whether Megatron creates an optimizer with a learning rate schedule."""
    return _has_end(a) and not a.skip_train


def _scales_loss(a: argparse.Namespace) -> bool:
    """Whether the loss scale adapts to the gradients."""
    return a.fp16 and not a.loss_scale


LENGTH_REFUSALS = (
    Refusal(
        lambda a: not _has_end(a) and not a.skip_train,
        "--train-iters and --train-samples are both missing, so training would have no end: add one of them",
    ),
    Refusal(
        lambda a: _anneals(a) and learning_course(a)["lr_decay_steps"] <= 0,
        "the learning rate would decay over 0 iterations: leave --lr-decay-iters (or --lr-decay-samples) out, or set "
        "it to at least 1",
    ),
    Refusal(
        lambda a: _anneals(a) and learning_course(a)["lr_warmup_steps"] >= (learning_course(a)["lr_decay_steps"] or 1),
        "the learning rate's warm-up would last at least as long as its decay, whose length includes the warm-up: "
        "shorten the warm-up (--lr-warmup-iters, --lr-warmup-samples, or an --lr-warmup-fraction below 1), or lengthen "
        "the decay (--lr-decay-iters or --lr-decay-samples; by default, it lasts for the whole run)",
    ),
    Refusal(
        lambda a: (
            _anneals(a)
            and a.lr_decay_style == "WSD"
            and (a.lr_wsd_decay_iters if a.train_iters else a.lr_wsd_decay_samples) is None
        ),
        "--lr-decay-style WSD needs the length of the decay: add --lr-wsd-decay-iters, or --lr-wsd-decay-samples if "
        "the length of the run is given in samples",
    ),
    Refusal(
        lambda a: _anneals(a) and a.lr is not None and a.lr_warmup_init > a.lr,
        "--lr-warmup-init {lr_warmup_init} is larger than --lr {lr}: use an initial learning rate of at most --lr",
    ),
    Refusal(
        lambda a: _anneals(a) and not 0 <= a.start_weight_decay <= a.end_weight_decay,
        "--start-weight-decay {start_weight_decay} and --end-weight-decay {end_weight_decay} cannot work: Megatron "
        "needs 0 <= start <= end; change one of them",
    ),
    Refusal(
        lambda a: a.override_opt_param_scheduler and a.use_checkpoint_opt_param_scheduler,
        "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other: use one of "
        "them",
    ),
    Refusal(
        lambda a: a.profile and not 0 <= a.profile_step_start < a.profile_step_end,
        "--profile-step-start {profile_step_start} and --profile-step-end {profile_step_end} do not give a range of "
        "steps: use numbers with 0 <= start < end",
    ),
    Refusal(
        lambda a: any(iteration < 1 for iteration in a.iterations_to_skip),
        "--iterations-to-skip {iterations_to_skip} contains a number below 1, but Megatron counts iterations from 1: "
        "use numbers of at least 1",
    ),
    Refusal(
        lambda a: a.phase_transition_iterations and a.train_samples is None,
        "--phase-transition-iterations without --train-samples cannot work: the number of samples ends the last "
        "phase; use --train-samples instead of --train-iters, or leave --phase-transition-iterations out",
    ),
    Refusal(
        lambda a: _scales_loss(a) and not 0 < a.min_loss_scale <= a.initial_loss_scale,
        "--min-loss-scale {min_loss_scale} and --initial-loss-scale {initial_loss_scale} cannot work: Megatron needs "
        "0 < minimum <= initial; change one of them",
    ),
    Refusal(
        lambda a: _scales_loss(a) and (a.loss_scale_window < 1 or a.hysteresis < 1),
        "--loss-scale-window {loss_scale_window} or --hysteresis {hysteresis} is too small: use at least 1 for both",
    ),
)
