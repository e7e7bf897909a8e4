"""Train a small model in a loop of its own, with or without vocabulary parallelism, on two GPUs or CPU processes."""

import os
import sys

import megatron_vp

megatron_vp.enable(vocab_parallel="--vocab-parallel" in sys.argv)

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

VOCAB, SEQUENCE, BATCH, MICROBATCHES, STAGES = 8192, 64, 2, 8, 2

gpus = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpus else "gloo")
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    attention_dropout=0,
    hidden_dropout=0,
    pipeline_model_parallel_size=STAGES,
    pipeline_dtype=torch.float32,
    use_cpu_initialization=not gpus,
    masked_softmax_fusion=gpus,
    bias_dropout_fusion=gpus,
)
config.finalize_model_grads_func = finalize_model_grads
model = GPTModel(
    config,
    get_gpt_layer_local_spec(),
    vocab_size=VOCAB,
    max_sequence_length=SEQUENCE,
    pre_process=parallel_state.is_pipeline_first_stage(),
    post_process=parallel_state.is_pipeline_last_stage(),
)
model = DistributedDataParallel(config, DistributedDataParallelConfig(), model.to(device))
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])


def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        text = torch.randint(200, (BATCH, SEQUENCE + 1), generator=generator).to(device)
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loss_func(token_losses):
    loss = token_losses.mean()
    return loss, {"loss": loss.detach().clone()}


def forward_step(data, model):
    tokens, labels = next(data)
    positions = torch.arange(SEQUENCE, device=device).expand(BATCH, SEQUENCE)
    return model(tokens, positions, None, labels=labels), loss_func


data = batches()
for iteration in range(3):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )
    optimizer.step()
    if reports:
        print(f"iteration {iteration}: loss {sum(report['loss'] for report in reports) / MICROBATCHES:.6f}")
