"""Lets slime train with vocabulary parallelism: with this folder in PYTHONPATH, pass slime's launcher
--custom-megatron-init-path slime_tokens.init. slime then computes its losses from log-probabilities and entropies.
"""

from functools import partial

import torch
from slime.backends.megatron_utils import loss, model

import megatron_vp

SETTINGS = {"vocab_parallel": True}


def init(args):
    megatron_vp.enable(**SETTINGS)
    request = megatron_vp.TokenRequest(args.rollout_temperature, entropy=True, entropy_gradient=args.entropy_coef != 0)
    args.rollout_temperature = 1.0  # The answers are already at this temperature.
    asked = {"output_processor": megatron_vp.token_log_probs, "output_processor_context": request}
    read_batch, run_schedule = model.get_batch, model.get_forward_backward_func

    def get_batch(*given):
        batch = read_batch(*given)
        tokens = batch["tokens"]
        samples = (batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths"))
        tokens.labels = loss._build_shifted_tokens(tokens.shape[1], tokens.device, *samples, args.allgather_cp)[None]
        return batch

    def forward_step(step, iterator, chunk):
        output, loss_func = step(
            iterator, lambda **given: chunk(**given | asked | {"labels": given["input_ids"].labels})
        )
        return output, lambda answer: loss_func(torch.stack([answer.log_probs, answer.entropy], -1))

    def split(values, *_, with_entropy=False, log_prob_keep_mask=None, **_others):
        assert log_prob_keep_mask is None, "log-probabilities over the tokens of top-p need whole logits"
        return values[:, :1], values[:, 1] if with_entropy else None

    def forward_backward(*, forward_step_func, **given):
        return run_schedule()(forward_step_func=partial(forward_step, forward_step_func), **given)

    model.get_batch, model.get_forward_backward_func = get_batch, lambda: forward_backward
    loss.calculate_log_probs_and_entropy = split
