"""Test `megatron_vp.enable` in a user's own loop: gradients as in plain Megatron, refusals, and `disable`."""

import contextlib
import importlib
import io
import re
from argparse import Namespace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from megatron_vp.errors import UserError
from megatron_vp.mcore.options.arguments import _with_checks
from tests.harness.ranks import RankError, process_group, run_ranks
from tests.mcore import engine, frozen, own_loop

BOUND = 1e-6
slow = pytest.mark.slow


def gradients(rank, ranks, settings=None, chunks=1, tied=False, hook=list):
    """Losses, and gradients by global name, of one iteration of the loop; plain without settings."""
    import megatron_vp
    from megatron_vp.mcore import patch_table, patches

    if settings is None:
        patches.apply(patch_table.patches_of("cpu platform"))
    else:
        megatron_vp.enable(**settings)
    with process_group(rank, ranks):
        model, losses = own_loop.train(ranks, chunks, tied, hook)
        found = {}
        for part in model:
            core = part.module
            for name, parameter in core.named_parameters():
                if name.startswith("decoder.layers."):
                    index, _, rest = name.removeprefix("decoder.layers.").partition(".")
                    name = f"{core.decoder.layers[int(index)].layer_number - 1}.{rest}"
                if parameter.requires_grad:
                    found[name] = parameter.main_grad.numpy().copy()
        return found, [float(each["lm loss"]) for each in losses]


def merged(ranks):
    whole, losses = {}, []
    for found, said in ranks:
        losses += said
        for name, value in found.items():
            cut = value.shape[0] < own_loop.VOCAB and ("word_embeddings" in name or "output_layer" in name)
            whole[name] = np.concatenate([whole[name], value]) if cut and name in whole else value
    return whole, losses


V_HALF = {"vocab_parallel": True, "vocab_parallel_algorithm": "vocab-1", "pipeline_schedule": "v-half"}
CASES = [
    ({"vocab_parallel": True}, 1, True, list),
    ({"vocab_parallel": True}, 2, False, list),
    ({}, 1, False, list),
    ({"pipeline_schedule": "zb-h1"}, 1, False, list),
    (V_HALF, 2, False, list),
    ({"vocab_parallel": True}, 1, False, frozen.vocabulary),
    pytest.param({"vocab_parallel": True, "pipeline_schedule": "zb-h1"}, 1, False, frozen.adapted, marks=slow),
]


@pytest.mark.parametrize(("settings", "chunks", "tied", "hook"), CASES)
def test_a_loop_of_ones_own_has_plain_megatrons_gradients(settings, chunks, tied, hook):
    as_megatron = chunks if "pipeline_schedule" not in settings else 1
    plain, plain_losses = merged(run_ranks(2, gradients, None, as_megatron, tied, hook))
    ours, losses = merged(run_ranks(2, gradients, settings, chunks, tied, hook))
    if tied:  # plain Megatron's last stage holds a copy, of which the gradient is added to the embedding's
        plain.pop("output_layer.weight", None)
    assert ours.keys() == plain.keys() and len(losses) == 4
    np.testing.assert_allclose(losses, plain_losses, rtol=BOUND)
    for name, expected in plain.items():
        assert np.linalg.norm(ours[name] - expected) <= BOUND * np.linalg.norm(expected), name


def gradients_of_the_engine(rank, ranks, version, fused, settings, chunks):
    """As `gradients`, of Transformer Engine's layers on the CPU; and the products that made their weights' gradients.

    fused: these products are accumulated by the layers.
    """
    with engine.on_cpu(version, fused), engine.counted_products() as products:
        importlib.reload(own_loop)
        from megatron.core.models.gpt import gpt_layer_specs

        own_loop.get_gpt_layer_local_spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
        own_loop.TransformerConfig = partial(own_loop.TransformerConfig, gradient_accumulation_fusion=fused)
        return gradients(rank, ranks, settings, chunks), products


@pytest.mark.parametrize(
    ("settings", "chunks", "fused"),
    [
        (V_HALF, 2, False),
        pytest.param({"pipeline_schedule": "zb-h1", "vocab_parallel": True}, 1, True, marks=slow),
    ],
)
def test_layers_of_transformer_engine_have_plain_megatrons_gradients(settings, chunks, fused):
    version = engine.require(engine.MEGATRON)
    plain = run_ranks(2, gradients_of_the_engine, version, fused, None, 1)
    ours = run_ranks(2, gradients_of_the_engine, version, fused, settings, chunks)
    expected, expected_losses = merged([found for found, _ in plain])
    found, losses = merged([found for found, _ in ours])
    np.testing.assert_allclose(losses, expected_losses, rtol=BOUND)
    assert found.keys() == expected.keys() and len(losses) == 4
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= BOUND * np.linalg.norm(value), name
    computed = sum(each.in_w + each.elsewhere for _, each in plain)
    assert computed == 4 * 4 * own_loop.MICROBATCHES  # of four layers, four products each
    in_w = computed if "pipeline_schedule" in settings else 0
    assert sum(each.in_w for _, each in ours) == in_w and sum(each.elsewhere for _, each in ours) == computed - in_w


def test_a_job_on_which_it_cannot_take_effect_is_refused():
    with pytest.raises(RankError, match="v-half has 2 chunks per rank, but this script's process groups have 1"):
        run_ranks(2, gradients, V_HALF, 1)
    with pytest.raises(RankError, match="pipeline-model-parallel-size"):
        run_ranks(1, gradients, {"vocab_parallel": True})


def output(rank, ranks, settings, chunks):
    """What a rank prints while the loop trains."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        gradients(rank, ranks, settings, chunks)
    return said.getvalue()


def test_a_loop_is_told_nothing_of_batches_and_groups_that_it_did_not_give():
    said, _ = run_ranks(2, output, V_HALF, 2)
    assert "2 ranks = 2 pipeline x 1 data; v-half, vocab-1" in said
    assert "--microbatch-group-size-per-virtual-pipeline-stage" not in said
    batch = {"global_batch_size": own_loop.BATCH * own_loop.MICROBATCHES, "micro_batch_size": own_loop.BATCH}
    said, _ = run_ranks(2, output, V_HALF | batch, 2)
    assert "; 4 microbatches; v-half, vocab-1" in said


def without_wrapper(rank, ranks):
    own_loop.DistributedDataParallel = lambda config, ddp, part, **_: part
    return gradients(rank, ranks, {"vocab_parallel": True})


def test_a_model_without_gradient_buffers_is_refused():
    with pytest.raises(RankError, match="did not wrap in Megatron's DistributedDataParallel"):
        run_ranks(2, without_wrapper)


def asked_for_its_place(rank, ranks):
    """What a forward_step finds of its chunk's place; losses of a loop that evaluates without a loss."""
    import megatron_vp

    megatron_vp.enable(vocab_parallel=True)
    from megatron.core.utils import unwrap_model

    places = []

    def forward_step(iterator, model, loss=own_loop.loss_func):
        core, text = unwrap_model(model), next(iterator)
        places.append((core.pre_process, core.post_process))
        tokens = text[:, :-1].contiguous() if core.pre_process else None
        labels = text[:, 1:].contiguous() if core.post_process else None
        return model(
            tokens,
            torch.arange(own_loop.SEQUENCE).expand(tokens.shape) if core.pre_process else None,
            None,
            labels=labels,
        ), loss

    def run(step, model, **options):
        sizes = {"seq_length": own_loop.SEQUENCE, "micro_batch_size": own_loop.BATCH} | options
        given = {"forward_step_func": step, "data_iterator": own_loop.samples(), "model": model[0]}
        return own_loop.get_forward_backward_func()(**given, num_microbatches=2, **sizes)

    with process_group(rank, ranks):
        model = own_loop.start(ranks)
        losses = run(forward_step, model)
        nothing = partial(forward_step, loss=lambda output: (torch.empty(0), {"kept": len(output)}))
        kept = run(nothing, model, forward_only=True)
        return set(places), len(losses), kept


def with_value_head(chunks):
    """What a framework does to train a critic."""
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = nn.Linear(64, 1)
    return chunks


def refusal(rank, ranks, hook):
    """What every rank says of a model that `hook` has changed before it is wrapped."""
    import megatron_vp

    megatron_vp.enable(vocab_parallel=True)
    with process_group(rank, ranks), pytest.raises(UserError) as refused:
        own_loop.start(ranks, hook=hook)
    return str(refused.value)


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (with_value_head, "output_layer is a Linear of torch"),
        (frozen.adapted_output_layer, "output_layer is a Adapter of "),
    ],
)
def test_a_changed_output_layer_is_refused_on_all_ranks(hook, said):
    assert all(re.search(said, each) for each in run_ranks(2, refusal, hook))


def test_a_loop_finds_its_place():
    first, last = run_ranks(2, asked_for_its_place, timeout=60)
    assert first[0] == {(True, False)} and last[0] == {(False, True)}
    assert first[1] == 0 and last[1] == 2 and last[2] == [{"kept": 2}] * 2


class EverythingOff:
    """Arguments that a loop made itself."""

    def __getattr__(self, _name):
        return None


def built_by_get_model(rank, ranks):
    """Chunks that Megatron's `get_model` builds in a loop that sets arguments of its own and lets nobody parse them."""
    import megatron_vp

    megatron_vp.enable(vocab_parallel=True)
    from megatron.training import training

    def build(config, chunks, tied, hook):
        sizes = {"vocab_size": own_loop.VOCAB, "max_sequence_length": own_loop.SEQUENCE}

        def provide(pre_process, post_process, **_):
            ends = {"pre_process": pre_process, "post_process": post_process}
            return own_loop.GPTModel(config, own_loop.get_gpt_layer_local_spec(), **sizes, **ends)

        with mock.patch.object(training, "get_args", lambda: EverythingOff()):
            return training.get_model(provide, wrap_with_ddp=False, config=config)

    with process_group(rank, ranks), mock.patch.object(own_loop, "build", build):
        (chunk,) = own_loop.start(ranks)
        return type(chunk.output_layer).__name__


def test_get_model_prepares_a_model_of_a_loop_without_parsed_arguments():
    assert run_ranks(2, built_by_get_model) == ["ShardedOutputLayer"] * 2


def forward_replaced(parts):
    """What a framework does after it has built a model: its own forward computes something else from the losses."""
    original = own_loop.GPTModel.forward
    own_loop.GPTModel.forward = lambda self, *args, **kwargs: 3.5 * original(self, *args, **kwargs)
    return parts


def test_a_forward_that_is_replaced_after_the_cut_is_refused():
    with pytest.raises(RankError, match=r"this script replaced GPTModel\.forward, and parts of the replacement would"):
        run_ranks(2, gradients, {"vocab_parallel": True}, 1, False, forward_replaced)


def with_megatrons_own(rank, ranks, settings):
    """The loop with the function that the getter returned before `enable`."""
    from megatron.core.pipeline_parallel import schedules

    own = schedules.forward_backward_pipelining_without_interleaving
    own_loop.get_forward_backward_func = lambda: own
    gradients(rank, ranks, settings)


@pytest.mark.parametrize("settings", [{"pipeline_schedule": "zb-h1"}, {"vocab_parallel": True}])
def test_a_schedule_of_megatrons_that_was_fetched_before_is_refused(settings):
    with pytest.raises(
        RankError, match=r"our schedule: remove that call, call get_forward_backward_func after megatron_vp\.enable"
    ):
        run_ranks(2, with_megatrons_own, settings)


def optimizer_state_of_one_layout(rank, ranks):
    """What a rank says when a loop saves or loads the distributed optimizer's state in Megatron's default formats."""
    import megatron_vp

    megatron_vp.enable(vocab_parallel=True)
    with process_group(rank, ranks):
        own_loop.start(ranks)
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        said, of_ours = [], Namespace(model_chunks=[nn.Identity()])
        for form in ("dp_reshardable", "dp_zero"):
            for loads in (False, True):
                with pytest.raises(UserError) as refused:
                    getattr(DistributedOptimizer, f"sharded_param_state_{form}")(of_ours, {}, loads)
                said.append(str(refused.value))
        return said


def test_optimizer_state_of_one_layout_is_refused_in_a_loop_of_ones_own():
    saves, loads, *_ = run_ranks(2, optimizer_state_of_one_layout)[0]
    assert re.search(r'saves .*sharded_state_dict with metadata=.*"fully_reshardable"', saves)
    assert "in this checkpoint has the format dp_reshardable, which can be loaded" in loads


def after_a_model(rank, ranks):
    """A plain model and Megatron's own schedule, and the call after both."""
    import megatron_vp
    from megatron_vp.mcore import patch_table, patches

    patches.apply(patch_table.patches_of("cpu platform"))
    with process_group(rank, ranks):
        own_loop.parallel_state.initialize_model_parallel()
        own_loop.model_parallel_cuda_manual_seed(1234)
        config = own_loop.TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True
        )
        model = own_loop.GPTModel(config, own_loop.get_gpt_layer_local_spec(), vocab_size=8, max_sequence_length=8)
        with pytest.raises(UserError, match=r"called after this script had built a GPTModel"):
            megatron_vp.enable(vocab_parallel=True)
        megatron_vp.enable().disable()  # without a schedule of ours, nothing is lost
        del model


def test_a_model_that_was_built_before_is_refused_at_the_call():
    run_ranks(1, after_a_model)


def test_arguments_that_the_settings_did_not_reach_are_refused():
    with pytest.raises(UserError, match=r"arguments that lack our options, .*: call megatron_vp\.enable first"):
        _with_checks(lambda args, defaults: args)(Namespace(num_layers=4))


def without_groups(rank, ranks):
    import megatron_vp

    megatron_vp.enable(vocab_parallel=True)
    with process_group(rank, ranks):
        config = own_loop.TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
        own_loop.GPTModel(config, own_loop.get_gpt_layer_local_spec(), vocab_size=8, max_sequence_length=8)


def test_a_model_without_megatrons_groups_is_refused():
    with pytest.raises(RankError, match=r"builds a model before initialize_model_parallel.*dist\.use_decentralized_pg"):
        run_ranks(1, without_groups)


def misuse(_rank, _ranks):
    """What wrong calls say; Megatron's functions with the plug-in on, and after it was switched off."""
    from megatron.core.distributed import TorchFullyShardedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import schedules

    import megatron_vp
    from megatron_vp.mcore import patches

    plain = schedules.forward_backward_pipelining_without_interleaving, GPTModel.__init__
    said = []
    for settings in ({"vocab_paralel": True}, {"vocab_parallel": "yes"}, {"pipeline_schedule": "v-haf"}):
        with pytest.raises(UserError) as refused:
            megatron_vp.enable(**settings)
        said.append(str(refused.value))
    assert patches.in_force() == ()
    handle = megatron_vp.enable(vocab_parallel=True)
    ours = schedules.forward_backward_pipelining_without_interleaving
    with pytest.raises(UserError) as refused:
        megatron_vp.enable(vocab_parallel=True)
    said.append(str(refused.value))
    sizes = {"num_microbatches": 1, "seq_length": 8, "micro_batch_size": 1}
    with pytest.raises(UserError) as refused:
        ours(forward_step_func=None, data_iterator=None, model=nn.Linear(2, 2), **sizes)
    said.append(str(refused.value))
    sharded = TorchFullyShardedDataParallel.__new__(TorchFullyShardedDataParallel)
    nn.Module.__init__(sharded)
    sharded.module = nn.Linear(1, 1)
    with pytest.raises(UserError) as refused:
        ours(forward_step_func=None, data_iterator=None, model=sharded, **sizes)
    said.append(str(refused.value))
    handle.disable()
    assert patches.in_force() == () and ours is not plain[0]
    assert (schedules.forward_backward_pipelining_without_interleaving, GPTModel.__init__) == plain
    return said


def test_wrong_calls_are_refused_in_one_line_and_disable_undoes_a_call():
    ((unknown, value, schedule, twice, unprepared, sharded),) = run_ranks(1, misuse)
    assert "'vocab_parallel'" in unknown and "megatron_vp.enable" in unknown
    assert "is a switch: write true or false" in value and "v-haf" in schedule
    assert "called twice" in twice
    assert "trains a Linear that it did not wrap" in unprepared
    assert "TorchFullyShardedDataParallel" in sharded and "wrap the model in DistributedDataParallel" in sharded
    assert not any("\n" in line for line in (unknown, value, schedule, twice, unprepared, sharded))
