"""A user's own training loop, which uses only megatron.core and creates its groups, models and steps itself.

`get_forward_backward_func` is imported before the plug-in is enabled, as in frameworks.
"""

from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

VOCAB, SEQUENCE, BATCH, MICROBATCHES, LAYERS = 40, 64, 2, 4, 4


def samples():
    generator = torch.Generator().manual_seed(7)
    while True:
        yield torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)


def loss_func(output):
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach()}


def forward_step(iterator, model):
    text = next(iterator)
    places = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    return model(text[:, :-1].contiguous(), places, None, labels=text[:, 1:].contiguous()), partial(loss_func)


def build(config, chunks, tied, hook):
    parts = []
    for index in range(chunks):
        stage = {"vp_stage": index} if chunks > 1 else {}
        ends = {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
        }
        sizes = {"vocab_size": VOCAB, "max_sequence_length": SEQUENCE, "share_embeddings_and_output_weights": tied}
        parts.append(GPTModel(config, get_gpt_layer_local_spec(), **sizes, **ends, **stage))
    parts = hook(parts)
    ddp = DistributedDataParallelConfig()
    return [DistributedDataParallel(config, ddp, part, disable_bucketing=bool(i)) for i, part in enumerate(parts)]


def start(ranks, chunks=1, tied=False, tensor=1, hook=list, context=1):
    """The chunks of a model on `ranks` pipeline ranks of `tensor` tensor ranks each.

    `hook` is given the rank's chunks before they are wrapped, and returns them.
    """
    virtual = chunks if chunks > 1 else None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=context,
    )
    return build(configuration(ranks, chunks, tensor, context), chunks, tied, hook)


def configuration(ranks, chunks=1, tensor=1, context=1, **sizes):
    """A model's configuration; restarts the generators from which its weights are drawn."""
    torch.manual_seed(1234 + 100 * (dist.get_rank() // context))
    model_parallel_cuda_manual_seed(1234)
    config = TransformerConfig(
        **{"num_layers": LAYERS, "hidden_size": 64, "num_attention_heads": 4} | sizes,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=context,
        # Megatron's interleaved schedule mixes up the messages of two ranks that it does not overlap.
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    return config


def train(ranks, chunks=1, tied=False, hook=list):
    """One iteration; returns the model's chunks, as `start` makes them, and the losses."""
    model = start(ranks, chunks, tied, hook=hook)
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[samples() for _ in range(chunks)] if chunks > 1 else samples(),
        model=model if chunks > 1 else model[0],
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )
    return model, losses
