"""A post-training loop on log-probabilities and entropies, from `token_log_probs` or from plain Megatron's logits."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear

from tests.harness.ranks import process_group
from tests.mcore import own_loop
from tests.mcore.own_loop import BATCH, MICROBATCHES, SEQUENCE, VOCAB

LENGTHS = (40, SEQUENCE, 8, 24)
"""Tokens of each microbatch that are not padding, if lengths differ."""
SILENT = 2
"""The microbatch without a response."""


def samples(lengths=None, cut=False):
    generator = torch.Generator().manual_seed(7)
    for microbatch in range(MICROBATCHES):
        text = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
        mask = torch.rand(BATCH, SEQUENCE, generator=generator) < (0 if microbatch == SILENT else 0.7)
        mask[:, -1] = False
        labels = torch.where(mask | (torch.arange(SEQUENCE) % 3 > 0), text[:, 1:], -100)
        sample = text[:, :-1].contiguous(), labels, mask, torch.randn(BATCH, SEQUENCE, generator=generator)
        if lengths is not None:
            mask[:, lengths[microbatch] :] = False
        yield tuple(each[:, : lengths[microbatch]].contiguous() for each in sample) if cut else sample


def of_logits(request, labels, logits):
    """The answer from whole logits."""
    log_softmax = torch.log_softmax(logits / request.temperature, -1)
    log_probs = log_softmax.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return log_probs, -(log_softmax.exp() * log_softmax).sum(-1)


def surrogate(request, mask, advantages, log_probs, entropy):
    """A clipped policy gradient, with a bonus for entropy if the request lets the loss depend on it."""
    ratio = torch.exp(log_probs - log_probs.detach() + 0.3 * advantages.sin())
    values = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if request.entropy_gradient:
        values = values - 0.5 * entropy
    loss = (values * mask).sum() / mask.sum().clamp(min=1)
    kept = [torch.where(mask, each, 0).detach().numpy() for each in (log_probs, entropy) if each is not None]
    return loss, {"values": kept, "loss": float(loss.detach())}


def trained(model, mask, result):
    """Without a response there is nothing to train on. Only plain Megatron needs a loss with a gradient then."""
    return result if mask.any() or type(model).__name__ != "Probe" else (torch.zeros(()), result[1])


def forward_step(request, whole, inside, iterator, model):
    sample = next(iterator)
    places = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)[:, : sample[0].shape[1]]
    ids, labels, mask, advantages, places = map(on_this_rank, (*sample, places))
    loss = partial(surrogate, request, mask, advantages)
    if whole:
        return model(ids, places, None), lambda logits: loss(*of_logits(request, labels, logits))
    from megatron_vp import TokenOutputs, token_log_probs

    asked = {"output_processor": token_log_probs, "output_processor_context": request}
    if inside == "nemo":
        output = model(ids, places, None, labels=ids, fp32_output=False, return_logprobs_for_linear_ce_fusion=True)
        return output, lambda given: trained(model, mask, loss(torch.nn.functional.pad(given, (0, 1)), None))
    if inside == "verl":
        from verl.models.mcore.model_forward_fused import FusedOutputProcessorContext, fused_output_processor

        context = FusedOutputProcessorContext(temperature=request.temperature)
        asked = {"output_processor": fused_output_processor, "output_processor_context": context}
    if inside == "packed":
        ids, places, rows, length = ids.reshape(1, -1), places.reshape(1, -1), labels.reshape(1, -1), ids.shape[1]
        ends = torch.arange(BATCH + 1, dtype=torch.int32) * length
        packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=length, max_seqlen_kv=length)
        output = model(ids, places, None, labels=rows, packed_seq_params=packed, **asked)
        return output, lambda given: trained(
            model, mask, loss(given.log_probs.view(BATCH, -1), given.entropy.view(BATCH, -1))
        )
    output = model(ids, places, None, labels=labels, **asked)
    if inside and isinstance(output, TokenOutputs):
        result = loss(output.log_probs, output.entropy)
        return output, lambda _: trained(model, mask, result)
    return output, lambda given: trained(model, mask, loss(given.log_probs, given.entropy))


def on_this_rank(values_bs):
    """The two pieces of each sequence that this context-parallel rank has."""
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    pieces = values_bs.chunk(2 * ranks, 1)
    return torch.cat([pieces[rank], pieces[-1 - rank]], 1) if ranks > 1 else values_bs


def collecting(step, *given):
    """Lets the loss function of a `forward_step` return data alone."""
    output, loss_func = step(*given)
    return output, lambda answer, non_loss_data: loss_func(answer)[1]


def call(model, request, whole=False, inside=False, forward_only=False, step=forward_step, lengths=None):
    collects = forward_only and request is not None and not request.entropy
    step = partial(collecting, step) if collects else step
    chunks, data = len(model), partial(samples, lengths, lengths is not None and not whole)
    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=partial(step, request, whole, inside),
            data_iterator=[data() for _ in range(chunks)] if chunks > 1 else data(),
            model=model if chunks > 1 else model[0],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE if lengths is None or whole else 1,
            micro_batch_size=1 if inside == "packed" else BATCH,
            forward_only=forward_only,
            collect_non_loss_data=collects,
        )


def as_in_verl():
    """Stands for verl's module, in which `fused_output_processor` computes the numbers with kernels of its own."""
    source = (
        "class FusedOutputProcessorContext(SimpleNamespace): pass\ndef fused_output_processor(**given): raise TypeError"
    )
    module = ModuleType("verl.models.mcore.model_forward_fused")
    module.SimpleNamespace = SimpleNamespace
    exec(source, vars(module))
    return mock.patch.dict(sys.modules, {module.__name__: module})


def as_in_nemo_rl():
    """NeMo-RL's patch of Megatron's model, without the log-probabilities that it computes itself."""
    megatrons = GPTModel.forward

    def forward(self, ids, places, mask, labels=None, *, return_logprobs_for_linear_ce_fusion=False):
        assert not return_logprobs_for_linear_ce_fusion
        return megatrons(self, ids, places, mask, labels=labels)

    both = {"forward": forward, "_original_forward_for_linear_ce_fusion": megatrons}
    return mock.patch.multiple(GPTModel, create=True, **both)


PACKAGES = {"verl": as_in_verl, "nemo": as_in_nemo_rl}


class Gemma2OutputLayer:
    """Megatron-Bridge's extension of Megatron's output layer, which caps the logits."""

    __module__ = "megatron.bridge.models.gemma.gemma2_provider"

    def forward(self, *args, **kwargs):
        logits, bias = super().forward(*args, **kwargs)
        return self.config.final_logit_softcapping * torch.tanh(logits / self.config.final_logit_softcapping), bias


class Capped(Gemma2OutputLayer, ColumnParallelLinear):
    pass


def changed(softcap, wide, parts):
    """The parts of a model, with a cap on the logits, or in fp64."""
    for part in parts:
        if softcap:
            part.config.final_logit_softcapping = softcap
            if part.post_process:
                part.output_layer.__class__ = Capped
        if wide:
            part.config.pipeline_dtype = torch.float64
            part.double()
    return parts


def with_other_attention():
    """Layers whose attention knows packed sequences and context parallelism."""
    from megatron_vp.mcore.model.attention import ScaledDotProductAttention

    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = ScaledDotProductAttention
    return spec


def started(
    ranks, settings, chunks, tied, tensor, *, num_layers=4, softcap=0.0, wide=False, context=1, packs=False, **options
):
    import megatron_vp
    from megatron_vp.mcore import patch_table, patches

    if settings is None:
        patches.apply(patch_table.patches_of("cpu platform"))
    else:
        megatron_vp.enable(**settings)
    own_loop.TransformerConfig = partial(own_loop.TransformerConfig, **options)
    own_loop.LAYERS = num_layers
    if packs or context > 1:
        own_loop.get_gpt_layer_local_spec = with_other_attention
    return own_loop.start(ranks, chunks, tied, tensor, partial(changed, softcap, wide), context)


def train(
    rank,
    world,
    settings,
    requests,
    chunks=1,
    tied=False,
    tensor=1,
    whole=False,
    inside=False,
    lengths=None,
    data=1,
    context=1,
    **options,
):
    """For every request, a forward-only call and a training call: reports of both, and gradients by global name."""
    import threading

    from megatron_vp import TokenRequest

    with process_group(rank, world), PACKAGES.get(inside, nullcontext)():
        options |= {"context": context, "packs": inside == "packed"}
        model, results = started(world // tensor // data // context, settings, chunks, tied, tensor, **options), []
        for asked in requests:
            request = TokenRequest(**asked)
            told = call(model, request, whole, inside, forward_only=True, lengths=lengths)
            for part in model:
                part.zero_grad_buffer()
            reports = call(model, request, whole, inside, lengths=lengths)
            results.append((gradients(model), told, reports))
        assert threading.active_count() == 1 or not [t for t in threading.enumerate() if "forward_step" in t.name]
        return results


def gradients(model):
    """The gradients of the chunks of a model, by global name."""
    found = {}
    for core in (part.module for part in model):
        for name, parameter in core.named_parameters():
            if name.startswith("decoder.layers."):
                index, _, rest = name.removeprefix("decoder.layers.").partition(".")
                name = f"{core.decoder.layers[int(index)].layer_number - 1}.{rest}"
            found[name] = parameter.main_grad.numpy().copy()
    return found


def merged(ranks, tensor=1):
    """The gradients of all ranks by name, shards joined, and the reports of both calls."""
    whole, reports = {}, []
    for found, *told in ranks:
        for name, value in found.items():
            cut = "word_embeddings" in name or "output_layer" in name
            if cut and name in whole and len(whole[name]) < VOCAB:
                value = np.concatenate([whole[name], value])
            elif name in whole and (not len(value) or (tensor > 1 and not cut)):
                continue
            whole[name] = value
        reports = [each or own for each, own in zip(told, reports or told, strict=True)]
    return whole, reports


VARIABLE = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
"""Megatron asks for this dispatcher, although the model has no experts."""


MUP = {"use_mup": True, "mup_base_hidden_size": 16}


def refused(rank, world, settings):
    """What each rank is told where requests or lengths do not fit; a call in between fits."""
    import threading

    from megatron_vp import TokenRequest
    from megatron_vp.errors import UserError
    from megatron_vp.mcore.model.preparation import MODEL

    with process_group(rank, world):
        model, told = started(world, settings, 1, False, 1, **VARIABLE), []
        arguments = getattr(model[0].module, MODEL).job.arguments

        def tell(request, step=forward_step):
            try:
                told.append(call(model, request, step=step)[:0])
            except UserError as error:
                told.append(str(error))

        tell(TokenRequest(0.7 if rank else 0.8))
        tell(TokenRequest() if rank else None, one_asks)
        tell(None if rank else TokenRequest(), one_asks)
        tell(TokenRequest(entropy_gradient=True))
        tell(None, missing_data if rank else forward_step)
        tell(None, shorter if rank else forward_step)
        model[0].config.variable_seq_lengths = False
        for option in ("vocab_z_loss", "vocab_label_smoothing", "mtp_num_layers"):
            object.__setattr__(arguments, option, 1)
            tell(TokenRequest())
            object.__setattr__(arguments, option, 0)
        tell(TokenRequest(entropy=True), entropy_unasked)
        assert not [each for each in threading.enumerate() if "forward_step" in each.name]
        return told


def one_asks(request, whole, inside, iterator, model):
    if request is not None:
        return forward_step(request, whole, inside, iterator, model)
    ids, labels, mask, _ = next(iterator)
    places = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    losses = model(ids, places, None, labels=labels.clamp(min=0))
    return losses, lambda given: ((given * mask).mean(), {})


def entropy_unasked(request, whole, inside, iterator, model):
    output, _ = forward_step(request, whole, inside, iterator, model)
    return output, lambda given: (given.entropy.mean(), {})


def shorter(request, whole, inside, iterator, model):
    return forward_step(request, whole, inside, iter([[each[:, 8:].contiguous() for each in next(iterator)]]), model)


def missing_data(request, whole, inside, iterator, model):
    raise StopIteration


def fails_after_the_model(rank, world, settings):
    """An exception of forward_step itself, once it computes with the answer."""
    import threading

    import megatron_vp
    from megatron_vp import TokenRequest

    megatron_vp.enable(**settings)
    with process_group(rank, world):
        model = own_loop.start(world)
        try:
            call(model, TokenRequest(), step=wrong_index)
        except IndexError as error:
            threads = [each.name for each in threading.enumerate() if "forward_step" in each.name]
            print("threads", threads, "in", error.__traceback__.tb_next and _last(error.__traceback__), flush=True)
            raise


def _last(traceback):
    while traceback.tb_next:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code.co_name


def wrong_index(request, whole, inside, iterator, model):
    result = forward_step(request, whole, inside, iterator, model)
    if type(result[0]).__name__ == "TokenOutputs":
        result[0].log_probs[BATCH]
    return result
