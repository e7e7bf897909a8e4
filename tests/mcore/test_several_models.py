"""Test a split actor together with a critic, a reference model and a model of other sizes, in one process."""

import importlib
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import nn

from megatron_vp.schedule import FAMILIES
from tests.harness.ranks import process_group, run_ranks
from tests.mcore import engine, own_loop, token_loop
from tests.mcore.own_loop import BATCH, SEQUENCE

slow = pytest.mark.slow
VOCAB_1, VOCAB_2 = ({"vocab_parallel": True, "vocab_parallel_algorithm": f"vocab-{index}"} for index in (1, 2))


class ValueHead(nn.Linear):
    """A critic's head, which frameworks put in the place of the output layer."""

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        return super().forward(hidden), None


def with_value_head(chunks):
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk.config.hidden_size, 1)
    return chunks


def values(request, _whole, _inside, iterator, model):
    """A critic's forward_step: squared errors of its values."""
    ids, _, mask, returns = next(iterator)
    places = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)

    def loss(values_bs1):
        return ((values_bs1[..., 0] - returns) ** 2 * mask).mean(), {"values": values_bs1.detach().numpy().copy()}

    return model(ids, places, None), loss


def called(model, step, request=None, trains=True):
    """Reports of one call, and the gradients of this rank."""
    for part in model if trains else ():
        part.zero_grad_buffer()
    reports = token_loop.call(model, request, step=step, forward_only=not trains)
    named = [(f"{index}.{name}", each) for index, part in enumerate(model) for name, each in part.named_parameters()]
    return reports, {name: each.main_grad.numpy().copy() for name, each in named if trains}


def beside(rank, ranks, settings, chunks, layers):
    """What critic and reference say beside an actor under `settings`, or on plain Megatron; the actor's calls before
    and after; and calls of a second split model, which is smaller.
    """
    import megatron_vp
    from megatron_vp import TokenRequest
    from megatron_vp.mcore import patch_table, patches
    from megatron_vp.mcore.settled import MODEL

    if settings is None:
        patches.apply(patch_table.patches_of("cpu platform"))
    else:
        handle = megatron_vp.enable(**settings)
    request, found = TokenRequest(0.7, entropy=True), {}
    actors = partial(own_loop.build, chunks=chunks, tied=True, hook=list)
    with process_group(rank, ranks):
        own_loop.configuration = partial(own_loop.configuration, num_layers=layers)
        if settings is None:
            own_loop.start(ranks, chunks)
        else:
            actor = own_loop.start(ranks, chunks)
            found["actor"] = called(actor, token_loop.forward_step, request)
            smaller = actors(own_loop.configuration(ranks, chunks, hidden_size=32, ffn_hidden_size=64))
            found["smaller"] = called(smaller, token_loop.forward_step, request)
            assert getattr(actor[0].module, MODEL).pipeline is getattr(smaller[0].module, MODEL).pipeline

        def build():
            sizes = {"hidden_size": 48, "ffn_hidden_size": 96}
            critic = own_loop.build(own_loop.configuration(ranks, chunks, **sizes), chunks, False, with_value_head)
            return critic, actors(own_loop.configuration(ranks, chunks))

        if settings is None:
            critic, reference = build()
        else:
            with handle.plain_models():
                critic, reference = build()
        for part in reference:
            part.requires_grad_(False)
        found["values"] = called(critic, values, trains=False)
        found["reference"] = called(reference, token_loop.forward_step, request, trains=False)
        found["critic"] = called(critic, values)
        if settings is not None:
            found["actor again"] = called(actor, token_loop.forward_step, request)
            found["smaller again"] = called(smaller, token_loop.forward_step, request)
        return found


def beside_on_the_engine(rank, ranks, version, *call):
    """As `beside`, with Transformer Engine's layers, whose weight gradients only a split model delays."""
    with engine.on_cpu(version, False):
        for module in (own_loop, token_loop):  # They have imported Megatron without the engine.
            importlib.reload(module)
        from megatron.core.models.gpt import gpt_layer_specs

        own_loop.get_gpt_layer_local_spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
        own_loop.TransformerConfig = partial(own_loop.TransformerConfig, gradient_accumulation_fusion=False)
        return beside(rank, ranks, *call)


@cache
def plain(ranks, chunks, layers):
    return run_ranks(ranks, beside, None, chunks, layers)


CASES = [
    pytest.param(
        (VOCAB_1 if index % 2 else VOCAB_2)
        | {"pipeline_schedule": name}
        | ({"activation_limit": "3"} if family.bases else {}),
        4,
        family.chunks or 2,
        marks=slow,
        id=name,
    )
    for index, (name, family) in enumerate(FAMILIES.items())
]


@pytest.mark.parametrize(("settings", "ranks", "chunks"), [(VOCAB_2 | {"pipeline_schedule": "zb-h1"}, 2, 1), *CASES])
def test_critic_and_reference_are_plain_megatrons_beside_a_split_actor(settings, ranks, chunks):
    layers = max(4, ranks * chunks)
    compare(run_ranks(ranks, beside, settings, chunks, layers), plain(ranks, chunks, layers))


@slow
def test_critic_and_reference_of_transformer_engine_delay_no_gradients():
    version, settings = engine.require(engine.MEGATRON), VOCAB_2 | {"pipeline_schedule": "zb-h1"}
    runs = (run_ranks(2, beside_on_the_engine, version, each, 1, 4) for each in (settings, None))
    compare(*runs)


def compare(ours, expected):
    assert sum(len(found["values"][0]) for found in ours) == own_loop.MICROBATCHES
    for found, other in zip(ours, expected, strict=True):
        for one, two in [(found[name], other[name]) for name in other] + [
            (found[name], found[f"{name} again"]) for name in ("actor", "smaller")
        ]:
            np.testing.assert_equal(one, two)
