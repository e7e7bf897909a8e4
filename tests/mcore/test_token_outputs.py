"""Test log-probabilities, entropies and their gradients against plain Megatron's whole logits."""

import re
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

import megatron_vp
from megatron_vp.errors import UserError
from megatron_vp.mcore.training.suspended import WAITS, Suspended
from tests.harness.ranks import run_ranks, run_ranks_to_their_end
from tests.mcore import own_loop, token_loop

BOUND = 1e-6
slow = pytest.mark.slow

POLICY = {"temperature": 2.0, "entropy": True}
BONUS = {"temperature": 0.3, "entropy_gradient": True}
ALONE: dict = {}
SHARDS = {2: "24,16", 3: "8,20,12", 4: "8,16,0,16"}
HALF = {"pipeline_schedule": "v-half"}
FLEX = {"pipeline_schedule": "v-flex", "activation_limit": "3"}
OF_PLAIN = {"lengths", "num_layers", "softcap", "context", *token_loop.MUP}
ONE, TWO = ({"vocab_parallel": True, "vocab_parallel_algorithm": f"vocab-{index}"} for index in (1, 2))


@cache
def _plain(ranks, chunks, tied, context=1, **options):
    requests = (POLICY, BONUS, ALONE)
    options["context"] = context
    found = run_ranks(ranks * context, token_loop.train, None, requests, chunks, tied, 1, True, **options)
    return {
        str(request): [token_loop.merged([rank[index] for rank in found[part::context]]) for part in range(context)]
        for index, request in enumerate(requests)
    }


def _compare(settings, requests, ranks, chunks, tied, tensor, inside, **options):
    data, context = options.get("data", 1), options.get("context", 1)
    stages = ranks // tensor // data // context
    if settings and "vocab_parallel" in settings:
        settings = {"vocab_shards": SHARDS[stages]} | settings
    ours = run_ranks(ranks, token_loop.train, settings, requests, chunks, tied, tensor, False, inside, **options)
    # Data-parallel ranks follow each other; all replicas get the same data. So do context-parallel ranks.
    ours = ours[::data]
    # An interleaved model has the initial weights of Megatron's.
    as_megatron = 1 if (settings or {}).get("pipeline_schedule", "interleaved") != "interleaved" else chunks
    same = {name: value for name, value in options.items() if name in OF_PLAIN}
    for index, part in product(range(len(requests)), range(context)):
        found, told = token_loop.merged([rank[index] for rank in ours[part::context]], tensor)
        expected, reports = _plain(stages, as_megatron, tied, **same)[str(requests[index])][part]
        if tied and settings:
            expected = {name: value for name, value in expected.items() if name != "output_layer.weight"}
        for call, plain in zip(told, reports, strict=True):
            assert len(call) == len(plain) == own_loop.MICROBATCHES
            for microbatch, other in zip(call, plain, strict=True):
                assert abs(microbatch["loss"] - other["loss"]) <= 2 * BOUND * abs(other["loss"])
                for values, whole in zip(microbatch["values"], other["values"], strict=False):
                    whole = whole[:, : values.shape[1]]
                    np.testing.assert_allclose(values, whole, atol=BOUND * max(1, np.abs(whole).max()))
        assert settings is None or found.keys() == expected.keys()
        for name, value in found.items():
            # With tensor parallelism, layers are compared only if they are whole.
            if tensor == 1 or value.shape == expected[name].shape:
                # Sums have other orders. A tied weight makes the most of it: 1.03e-6 in one norm.
                others = tensor > 1 or inside == "packed" or tied
                bound = BOUND * (1 + others) * np.abs(expected[name]).max()
                assert np.abs(value - expected[name]).max() <= bound, name


CASES = [
    # Settings, requests, ranks, chunks, tied, tensor ranks, whether forward_step goes on computing.
    (TWO, [POLICY, ALONE], 2, 1, False, 1, False),
    (ONE | {"pipeline_schedule": "v-half"}, [BONUS, POLICY], 2, 2, False, 1, True),
    (None, [BONUS, POLICY], 2, 1, False, 1, True),
    ({"pipeline_schedule": "v-half"}, [BONUS, ALONE], 2, 2, False, 1, True),
    (TWO | {"pipeline_schedule": "zb-h1", "vocab_shards": "8,32"}, [POLICY], 2, 1, True, 1, True),
    (ONE, [BONUS], 2, 2, False, 1, False),
    (TWO, [POLICY], 2, 1, False, 1, "verl"),
    (TWO, [ALONE], 2, 1, False, 1, "nemo"),
    pytest.param(ONE, [BONUS], 2, 1, False, 1, "verl", marks=slow),
    pytest.param({"pipeline_schedule": "v-half"}, [ALONE], 2, 2, False, 1, "nemo", marks=slow),
    *(
        pytest.param(method | {"pipeline_schedule": name}, requests, ranks, chunks, tied, 1, inside, marks=slow)
        for method, requests in ((ONE, [BONUS, POLICY, ALONE]), (TWO, [POLICY, ALONE]))
        for name, ranks, chunks, tied, inside in (
            ("1f1b", 4, 1, False, True),
            ("interleaved", 2, 2, True, False),
            ("v-half", 4, 2, False, True),
            ("zb-h1", 4, 1, True, True),
            ("zb-v", 4, 2, False, False),
        )
    ),
    *(
        pytest.param(method | FLEX, requests, ranks, 2, False, 1, ranks == 2, marks=slow)
        for method, requests in ((ONE, [BONUS, ALONE]), (TWO, [POLICY]))
        for ranks in (2, 4)
    ),
    pytest.param(
        ONE | {"pipeline_schedule": "1f1b", "vocab_shards": "40,0"}, [BONUS], 2, 1, False, 1, False, marks=slow
    ),
    pytest.param(None, [BONUS, POLICY], 4, 1, False, 2, False, marks=slow),
    pytest.param(ONE, [BONUS], 4, 1, False, 2, True, marks=slow),
]


@pytest.mark.parametrize(("settings", "requests_", "ranks", "chunks", "tied", "tensor", "inside"), CASES)
def test_log_probabilities_entropies_and_gradients_are_those_of_whole_logits(
    settings, requests_, ranks, chunks, tied, tensor, inside
):
    _compare(settings, requests_, ranks, chunks, tied, tensor, inside)


@pytest.mark.parametrize(
    ("settings", "request_", "ranks", "chunks", "tensor"),
    [
        (ONE | {"pipeline_schedule": "v-half"}, BONUS, 2, 2, 1),
        (TWO | {"pipeline_schedule": "zb-h1", "offload_chunks": "all"}, POLICY, 2, 1, 1),
        pytest.param({"pipeline_schedule": "v-half"}, BONUS, 2, 2, 1, marks=slow),
        pytest.param(TWO, POLICY, 4, 1, 1, marks=slow),
        pytest.param(ONE, POLICY, 4, 1, 2, marks=slow),
    ],
)
def test_microbatches_of_different_lengths_are_those_of_padded_ones(settings, request_, ranks, chunks, tensor):
    options = token_loop.VARIABLE | {"lengths": token_loop.LENGTHS}
    if tensor > 1:
        options["sequence_parallel"] = True
    _compare(settings, [request_], ranks, chunks, False, tensor, True, **options)


@slow
@pytest.mark.parametrize(
    ("settings", "request_", "ranks", "chunks", "inside", "options"),
    [
        (ONE, POLICY, 2, 1, False, token_loop.MUP),
        (TWO | HALF, POLICY, 2, 2, False, token_loop.MUP),
        (None, POLICY, 2, 1, False, token_loop.MUP),
        (ONE | HALF, BONUS, 2, 2, True, {"softcap": 0.3}),
        (TWO, POLICY, 2, 1, False, {"softcap": 0.3}),
        (ONE | HALF, BONUS, 4, 2, True, {"data": 2}),
        (TWO, POLICY, 4, 1, True, {"data": 2}),
        (ONE | {"core_attention": "sdpa"}, BONUS, 4, 1, True, {"context": 2}),
        (TWO | HALF | {"core_attention": "sdpa"}, POLICY, 4, 2, False, {"context": 2}),
        (ONE | {"pipeline_schedule": "zb-h1"}, BONUS, 3, 1, False, {"num_layers": 6}),
        (TWO | HALF, POLICY, 3, 2, True, {"num_layers": 6}),
        (ONE, BONUS, 2, 1, "packed", token_loop.VARIABLE | {"lengths": token_loop.LENGTHS}),
        (TWO | HALF, POLICY, 2, 2, "packed", token_loop.VARIABLE | {"lengths": token_loop.LENGTHS}),
    ],
)
def test_other_models_and_ranks(settings, request_, ranks, chunks, inside, options):
    _compare(settings, [request_], ranks, chunks, False, 1, inside, **options)


@slow
@pytest.mark.parametrize(
    ("settings", "requests_", "chunks"), [(ONE | HALF, [BONUS, ALONE], 2), (TWO, [POLICY, ALONE], 1)]
)
def test_gradients_are_no_farther_from_fp64_than_those_of_whole_logits(settings, requests_, chunks):
    """In fp32, both are up to 1e-6 of a tensor's largest entry from fp64, so they may be farther from each other."""
    ours = run_ranks(2, token_loop.train, settings | {"vocab_shards": SHARDS[2]}, requests_, chunks)
    for index, request in enumerate(requests_):
        found, _ = token_loop.merged([rank[index] for rank in ours])
        (plain, _), (exact, _) = (_plain(2, 1, False, **wide)[str(request)][0] for wide in ({}, {"wide": True}))
        distances = [
            [np.abs(each[name] - value).max() / np.abs(value).max() for name, value in exact.items()]
            for each in (found, plain)
        ]
        assert exact.keys() == found.keys() and exact["0.input_layernorm.bias"].dtype == np.float64
        assert max(distances[1]) < 2e-6 and np.linalg.norm(distances[0]) <= 1.1 * np.linalg.norm(distances[1])


@slow
@pytest.mark.parametrize("settings", [ONE | {"pipeline_schedule": "zb-h1"}, TWO])
def test_equal_lengths_give_the_bits_of_a_call_without_lengths(settings):
    lengths = {"lengths": (own_loop.SEQUENCE,) * own_loop.MICROBATCHES, **token_loop.VARIABLE}
    runs = [run_ranks(2, token_loop.train, settings, [POLICY], **options) for options in ({}, lengths)]
    for one, other in zip(*runs, strict=True):
        for (found, *told), (expected, *reports) in zip(one, other, strict=True):
            assert str(told) == str(reports)
            assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_requests_that_do_not_fit_are_refused_on_all_ranks_by_name():
    first, last = run_ranks(2, token_loop.refused, TWO)
    # The loss function runs on the last rank alone.
    assert first.pop() == [] and last.pop().startswith("the loss depends on the entropy, but the TokenRequest has")
    assert len(first) == len(last) == 9
    for own, other, said in zip(
        first,
        last,
        [
            r"rank 0 asks for TokenRequest\(temperature=0.8, .* but rank 1, where the loss function runs, asks for",
            None,
            r"rank 0 asks for TokenRequest\(temperature=1.0, .* asks for token losses: pass",
            "a loss that depends on the entropy is not supported by vocab-2",
            "forward_step ran out of data",
            r"microbatch 0 has the shape \(2, 56\) on rank 1, but \(2, 64\) on rank 0: with variable_seq_lengths",
            "--vocab-z-loss changes the loss",
            "--vocab-label-smoothing changes the loss",
            "--mtp-num-layers changes the loss",
        ],
        strict=True,
    ):
        if said is None:  # The last rank asks, and the others need not.
            assert own == other == []
        else:
            assert re.search(said, own) and re.search(said, other) and "\n" not in own + other


def test_an_exception_of_a_suspended_forward_step_keeps_its_traceback_and_leaves_no_thread():
    ends = run_ranks_to_their_end(2, token_loop.fails_after_the_model, TWO)
    assert "threads [] in wrong_index" in ends[1][1]


class Layer(torch.nn.Linear):
    """Megatron's output layer on one tensor rank."""

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        return super().forward(hidden), None


def _asked(hidden, labels, layer, request):
    given = {"hidden_states": hidden, "output_layer": layer, "output_weight": None, "labels": labels}
    return megatron_vp.token_log_probs(**given, context=request, scale_logits=lambda logits: 0.5 * logits, config=None)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.bfloat16, 1e-2)])
def test_the_output_processor_itself(dtype, bound):
    torch.manual_seed(3)
    layer, labels = Layer(8, 11, bias=False, dtype=dtype), torch.randint(11, (2, 5))
    hidden, request = torch.randn(5, 2, 8, dtype=dtype), megatron_vp.TokenRequest(0.7, entropy_gradient=True)
    found, expected = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    outputs = _asked(found, labels, layer, request)
    weight = layer.weight.detach().double().requires_grad_()
    log_softmax = torch.log_softmax((expected @ weight.t() * 0.5 / 0.7).transpose(0, 1), -1)
    log_probs = log_softmax.gather(-1, labels[..., None])[..., 0]
    entropy, factor = -(log_softmax.exp() * log_softmax).sum(-1), torch.randn(2, 5)
    for values in (outputs.log_probs, outputs.entropy), (log_probs, entropy):
        (values[0] * factor + 0.3 * values[1].square()).sum().backward(retain_graph=True)
    pairs = (outputs.log_probs, log_probs), (outputs.entropy, entropy)
    for value, reference in (*pairs, (found.grad, expected.grad), (layer.weight.grad, weight.grad)):
        assert (value.double() - reference).norm() <= bound * reference.norm()
    with pytest.raises(RuntimeError, match="it can run only once"):
        outputs.log_probs.sum().backward()


def test_what_the_output_processor_refuses():
    layer, labels = Layer(8, 11, bias=False), torch.full((2, 5), 11)
    hidden = torch.randn(5, 2, 8)
    with pytest.raises(UserError, match="needs labels"):
        _asked(hidden, None, layer, None)
    with pytest.raises(UserError, match=r"needs a megatron_vp\.TokenRequest"):
        _asked(hidden, labels, layer, {"temperature": 0.7})
    with pytest.raises(UserError, match="give a positive number"):
        megatron_vp.TokenRequest(0.0)
    log_probs = _asked(hidden, labels, layer, None).log_probs
    (log_probs * 0).sum().backward()
    outputs = _asked(hidden, labels, layer, megatron_vp.TokenRequest(entropy=True))
    with pytest.raises(UserError, match="the loss depends on the entropy, but the TokenRequest has"):
        outputs.entropy.sum().backward()
    with pytest.raises(UserError, match="label 11 is outside the vocabulary of 11 tokens"):
        _asked(hidden, labels, layer, None).log_probs.sum().backward()


def test_a_suspended_forward_step_has_the_modes_of_its_caller_and_ends_with_it():
    modes = []

    def step():
        modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        try:
            return own.wait_for_output()
        finally:
            modes.append("ended")

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        own = Suspended(step)
        assert own.start() is WAITS and own.resume(7) == 7
    assert modes == [(False, True, torch.bfloat16), "ended"]
    own = Suspended(step)
    own.start()
    own.abandon()
    assert modes[2:] == [(True, False, torch.bfloat16), "ended"] and not own._thread.is_alive()
