"""Train a small policy with GRPO on two CPU processes, with or without vocabulary parallelism.

Each step samples responses with a whole model on each rank, scores them, and trains the pipelined actor.
`--draw-once` trains on the first responses in all steps.
"""

import dataclasses
import sys
from functools import partial

import megatron_vp
from megatron_vp import TokenRequest, token_log_probs

handle = megatron_vp.enable(vocab_parallel="--vocab-parallel" in sys.argv)

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

VOCAB, PROMPT, SEQUENCE, GROUPS, SAMPLES, STEPS, STAGES = 64, 4, 16, 4, 16, 50, 2
REQUEST = TokenRequest(temperature=0.8, entropy=True)

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
model_parallel_cuda_manual_seed(1)
torch.manual_seed(1)
rank, positions = dist.get_rank(), torch.arange(SEQUENCE)[None]
config = TransformerConfig(
    num_layers=STAGES,
    hidden_size=32,
    num_attention_heads=4,
    attention_dropout=0,
    hidden_dropout=0,
    pipeline_model_parallel_size=STAGES,
    pipeline_dtype=torch.float32,
    use_cpu_initialization=True,
    masked_softmax_fusion=False,
    bias_dropout_fusion=False,
)
config.finalize_model_grads_func = finalize_model_grads
build = partial(
    GPTModel, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=SEQUENCE
)
actor = build(config, pre_process=rank == 0, post_process=rank == STAGES - 1)
actor = DistributedDataParallel(config, DistributedDataParallelConfig(), actor)
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=2e-3), [actor])
with handle.plain_models():  # Stands for an inference engine.
    alone = ProcessGroupCollection.use_mpu_process_groups()
    alone.pp = alone.embd = dist.new_subgroups(1)[0]
    engine = build(dataclasses.replace(config, pipeline_model_parallel_size=1), pg_collection=alone)


@torch.no_grad()
def refit():
    """Give the actor's weights to the engines of all ranks. Layer 0 of a stage is layer `rank` of the whole model."""
    stages = [None] * STAGES
    with megatron_vp.whole_vocabulary(actor):
        weights = actor.module.named_parameters()
        dist.all_gather_object(stages, {name.replace("layers.0", f"layers.{rank}"): each for name, each in weights})
    for name, weight in engine.named_parameters():
        weight.copy_(next(stage[name] for stage in stages if name in stage))


@torch.no_grad()
def sample():
    """Draw prompts, continue them by responses of the engine, and score these by their share of small token ids."""
    tokens = torch.randint(VOCAB, (GROUPS, 1, PROMPT)).expand(-1, SAMPLES, -1).flatten(0, 1)
    for end in range(PROMPT, SEQUENCE + 1):
        logits = engine(tokens, positions[:, :end], None)[:, -1] / REQUEST.temperature
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
    dist.broadcast(tokens, src=0)
    tokens = tokens.view(GROUPS, SAMPLES, -1)
    return tokens, (tokens[..., PROMPT:] < VOCAB // 4).float().mean(-1)


def policy_loss(advantages, old, output):
    """The clipped loss of GRPO; without old log-probabilities, only report those of the policy."""
    new = output.log_probs[:, PROMPT - 1 :]
    if old is None:
        return new.mean(), new
    ratio = torch.exp(new - old)
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    return loss, torch.stack([loss.detach(), output.entropy.mean()])


def forward_step(data, model):
    tokens, advantages, old = next(data)
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    asked = {"output_processor": token_log_probs, "output_processor_context": REQUEST}
    return model(ids, positions.expand_as(ids), None, labels=labels, **asked), partial(policy_loss, advantages, old)


def call(tokens, rewards, old, forward_only):
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=zip(tokens, advantages[..., None], old, strict=True),
        model=actor,
        num_microbatches=GROUPS,
        seq_length=SEQUENCE,
        micro_batch_size=SAMPLES,
        forward_only=forward_only,
    )


history = []
for step in range(STEPS):
    if step == 0 or "--draw-once" not in sys.argv:
        refit()
        tokens, rewards = sample()
        with torch.no_grad():
            old = call(tokens, rewards, [None] * GROUPS, forward_only=True) or [None] * GROUPS
    actor.zero_grad_buffer()
    optimizer.zero_grad()
    reports = call(tokens, rewards, old, forward_only=False)
    optimizer.step()
    if reports:
        history.append([rewards.mean().item(), *torch.stack(reports).mean(0).tolist()])  # with loss and entropy
        print(f"step {step}: reward {history[-1][0]:.3f}, entropy {history[-1][2]:.3f}")
