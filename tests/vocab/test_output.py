"""Test passes S and T of all shards of a vocabulary against autograd in fp64."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_vp.vocab import operations, output
from megatron_vp.vocab.loss import CROSS_ENTROPY, GlobalStatistics, TokenLoss
from megatron_vp.vocab.operations import EagerOperations
from megatron_vp.vocab.output import OutputLayer
from megatron_vp.vocab.shards import VocabShards

TOKENS, HIDDEN = 37, 16
# Uneven, with an empty last shard, one shard alone, and even.
CUTS = [(50, 3), (9, 4), (5, 4), (64, 1), (64, 8)]


@pytest.fixture(autouse=True)
def logits_of_several_blocks(monkeypatch):
    monkeypatch.setattr(operations, "ROWS_PER_BLOCK", 16)


def test_what_is_kept_from_s_to_t_is_two_bytes_a_logit_and_x_and_vectors():
    vocab, shards = 640, VocabShards(640, 2)
    x, weight, labels, _ = _problem(vocab, torch.bfloat16)
    pending = OutputLayer(torch.nn.Parameter(weight[: vocab // 2]), shards, 0)(x, labels)
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for value in vars(pending).values()
        if isinstance(value, torch.Tensor)
    }
    vectors = 3 * 4 + 8 + 4  # statistics and the target's logit in fp32, the target's column
    assert sum(storages.values()) == TOKENS * (2 * vocab // 2 + 2 * HIDDEN + vectors)


class Launches(TorchDispatchMode):
    """Lists what PyTorch would launch on a device: all but views and memory."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, result = function.overloadpacket.__name__, function(*args, **(kwargs or {}))
        made = isinstance(result, torch.Tensor) and not function.is_view
        if made and not name.startswith(("empty", "new_empty", "detach")):
            self.names.append(name)
        return result


def test_beside_the_operations_a_pass_is_its_gemms_alone():
    """Of an operation, one launch on a GPU, fake tensors show none: whatever else there was would be listed."""
    vocab = 64
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(vocab // 2, HIDDEN, dtype=torch.bfloat16))
        weight.main_grad = torch.empty(vocab // 2, HIDDEN)
        x, labels, g = torch.empty(5, HIDDEN, dtype=torch.bfloat16), torch.empty(5, dtype=torch.int64), torch.empty(5)
        total = GlobalStatistics(*torch.empty(3, 5))
        layer = OutputLayer(weight, VocabShards(vocab, 2), 1)
        for algorithm, of_s, of_c1, of_t in (("vocab-1", ["mm"], [], ["mm"]), ("vocab-2", ["mm", "mm"], [], [])):
            with Launches() as s:
                pending = layer(x, labels)
                unscaled = layer.unscaled_input_gradient(pending) if algorithm == "vocab-2" else None
            with Launches() as c1:
                if algorithm == "vocab-2":
                    layer.rescaled_input_gradient(unscaled, pending, total)
            with Launches() as t:
                layer.t_pass(pending, total, g, input_gradient=algorithm == "vocab-1")
            assert (s.names, c1.names, t.names) == (of_s, of_c1, of_t)


@pytest.mark.parametrize("algorithm", ["vocab-1", "vocab-2"])
def test_a_frozen_weight_launches_no_gradient_and_frees_what_only_that_needs(algorithm):
    vocab, shards = 640, VocabShards(640, 2)
    x, weight, labels, g = _problem(vocab, torch.bfloat16)
    parts = []
    for trains in (True, False):
        own = torch.nn.Parameter(weight[: vocab // 2].clone(), requires_grad=trains)
        if trains:
            own.main_grad = torch.zeros(own.shape)
        layer = OutputLayer(own, shards, 0)
        pending = layer(x, labels)
        total = GlobalStatistics(*pending.statistics_3n)
        unscaled = layer.unscaled_input_gradient(pending) if algorithm == "vocab-2" else None
        kept = {pending.x_nh.nbytes, pending.exp_nv.nbytes}
        with Launches() as t:
            part = layer.t_pass(pending, total, g, input_gradient=algorithm == "vocab-1")
        parts.append(part if unscaled is None else layer.rescaled_input_gradient(unscaled, pending, total))
    assert kept == ({0} if algorithm == "vocab-2" else {0, 2 * TOKENS * vocab // 2})
    assert t.names.count("mm") == (algorithm == "vocab-1") and (algorithm == "vocab-1" or not t.names)
    assert torch.equal(*parts)


def _problem(vocab, dtype, seed=0, logit_scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64) * logit_scale
    weight = torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.float64) / HIDDEN**0.5
    labels = torch.randint(vocab, (TOKENS,), generator=generator)
    row_gradient = torch.rand(TOKENS, generator=generator, dtype=torch.float64) / TOKENS
    row_gradient[::5] = 0  # masked tokens
    return x.to(dtype), weight.to(dtype), labels, row_gradient.float()


def _reference(x, weight, labels, row_gradient, loss=CROSS_ENTROPY, softcap=0.0):
    x, weight = (tensor.double().requires_grad_() for tensor in (x, weight))
    logits = x @ weight.t()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / loss.temperature
    # torch spreads the smoothed mass over all V tokens, the target included; ours and Megatron's over the other V - 1.
    smoothing = loss.label_smoothing * len(weight) / (len(weight) - 1)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    losses = losses + loss.z_loss * logits.logsumexp(-1) ** 2
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    of_loss, of_entropy = row_gradient.double() if row_gradient.dim() == 2 else (row_gradient.double(), 0)
    (losses * of_loss + entropies * of_entropy).sum().backward()
    return losses.detach(), x.grad, weight.grad, entropies.detach()


def _sharded(x, weight, labels, row_gradient, count, algorithm, loss=CROSS_ENTROPY, softcap=0.0):
    """The passes of all shards in one process; barriers become sums and stacks."""
    shards = VocabShards(len(weight), count)
    layers = []
    for index in range(count):
        rows = weight[shards.start(index) : shards.start(index) + shards.rows(index)].clone()
        parameter = torch.nn.Parameter(rows)
        parameter.main_grad = torch.zeros_like(rows, dtype=torch.promote_types(rows.dtype, torch.float32))
        layers.append(OutputLayer(parameter, shards, index, softcap))
    pending = [layer(x, labels, loss) for layer in layers]
    row_gradient = row_gradient.to(pending[0].statistics_3n.dtype) / loss.temperature
    unscaled = [layer.unscaled_input_gradient(state) for layer, state in zip(layers, pending, strict=True)]
    total_3n = torch.empty_like(pending[0].statistics_3n)
    output.operations_for(total_3n).fold_(total_3n, torch.stack([state.statistics_3n for state in pending]))
    total = GlobalStatistics(*total_3n)
    if algorithm == "vocab-2":
        parts = [
            layer.rescaled_input_gradient(early, state, total)
            for layer, early, state in zip(layers, unscaled, pending, strict=True)
        ]
    t_parts = [
        layer.t_pass(state, total, row_gradient, input_gradient=algorithm == "vocab-1")
        for layer, state in zip(layers, pending, strict=True)
    ]
    if algorithm == "vocab-1":
        parts = t_parts
    input_gradient = sum(parts) * (1 if loss.entropy_gradient else row_gradient[:, None])
    found = total.token_loss(loss), input_gradient, torch.cat([layer.weight.main_grad for layer in layers])
    return (*found, total.entropy_n) if loss.entropy else found


def _distance(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("algorithm", ["vocab-1", "vocab-2"])
@pytest.mark.parametrize(("vocab", "count"), CUTS)
@pytest.mark.parametrize(
    ("dtype", "loss_bound", "gradient_bound"),
    [
        (torch.float64, 1e-14, 1e-14),
        (torch.float32, 1e-6, 1e-6),
        (torch.bfloat16, 3e-3, 6e-3),
        (torch.float16, 4e-4, 8e-4),
    ],
)
def test_loss_and_gradients(algorithm, vocab, count, dtype, loss_bound, gradient_bound):
    problem = _problem(vocab, dtype)
    expected = _reference(*problem)
    found = _sharded(*problem, count, algorithm)
    bounds = (loss_bound, gradient_bound, gradient_bound)
    for name, value, reference, bound in zip(("loss", "dX", "dW"), found, expected, bounds, strict=False):
        assert _distance(value, reference) <= bound, name


@pytest.mark.parametrize("vocab", [64, 4096])
@pytest.mark.parametrize("logit_scale", [1.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_gradient_is_off_by_two_roundings_where_a_rounded_d_is_by_one(monkeypatch, dtype, logit_scale, vocab):
    def add_product_(self, matrix_vh, left_nv, right_nh):  # as a GEMM into fp32 does
        matrix_vh += (left_nv.double().t() @ right_nh.double()).to(matrix_vh.dtype)

    monkeypatch.setattr(EagerOperations, "add_product_", add_product_)
    loss_scale = 2**12 if dtype == torch.float16 else 1
    x, weight, labels, row_gradient = _problem(vocab, dtype, logit_scale=logit_scale)
    row_gradient *= loss_scale
    expected = _reference(x, weight, labels, row_gradient)[2]
    found = _sharded(x, weight, labels, row_gradient, 4, "vocab-2")[2]
    d = torch.softmax((x @ weight.t()).float(), -1)
    d[torch.arange(TOKENS), labels] -= 1
    rounded = (d * row_gradient[:, None]).to(dtype)
    assert _distance(found, expected) < 2 * _distance(rounded.double().t() @ x.double(), expected)


# Large coefficients, so that a wrong term shows; a z-loss alone, smoothing alone, and both.
LOSSES = [TokenLoss(z_loss=0.3), TokenLoss(label_smoothing=0.2), TokenLoss(label_smoothing=0.2, z_loss=0.3)]


@pytest.mark.parametrize("algorithm", ["vocab-1", "vocab-2"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("vocab", "count"), CUTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
def test_label_smoothing_and_z_loss(algorithm, loss, vocab, count, dtype, bound):
    problem = _problem(vocab, dtype)
    expected = _reference(*problem, loss)
    found = _sharded(*problem, count, algorithm, loss)
    for name, value, reference in zip(("loss", "dX", "dW"), found, expected, strict=False):
        assert _distance(value, reference) <= bound, name


@pytest.mark.parametrize("algorithm", ["vocab-1", "vocab-2"])
@pytest.mark.parametrize("loss", [CROSS_ENTROPY, TokenLoss(z_loss=0.3)])
@pytest.mark.parametrize(("vocab", "count"), CUTS)
# From logits of which most are nearly linear to such as the cap flattens.
@pytest.mark.parametrize(("logit_scale", "softcap"), [(1.0, 30.0), (4.0, 3.0)])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)]
)
def test_softcap(algorithm, loss, vocab, count, logit_scale, softcap, dtype, bound):
    problem = _problem(vocab, dtype, logit_scale=logit_scale)
    expected = _reference(*problem, loss, softcap)
    found = _sharded(*problem, count, algorithm, loss, softcap)
    for name, value, reference in zip(("loss", "dX", "dW"), found, expected, strict=False):
        assert _distance(value, reference) <= bound, name


REQUESTS = [TokenLoss(temperature=0.7), TokenLoss(temperature=2.0, entropy=True), TokenLoss(entropy=True)]
DEPENDS = TokenLoss(temperature=0.3, entropy=True, entropy_gradient=True)


def _requests(loss, vocab, dtype, logit_scale=1.0):
    x, weight, labels, row_gradient = _problem(vocab, dtype, logit_scale=logit_scale)
    if loss.entropy_gradient:
        row_gradient = torch.stack([row_gradient, row_gradient.flip(0) - 0.01])
    return x, weight, labels, row_gradient


@pytest.mark.parametrize(
    ("loss", "algorithm"),
    [*((loss, f"vocab-{i}") for loss in REQUESTS for i in (1, 2)), (DEPENDS, "vocab-1")],
)
@pytest.mark.parametrize(("vocab", "count"), [(50, 3), (9, 4), (64, 8)])
@pytest.mark.parametrize(("logit_scale", "softcap"), [(1.0, 0.0), (25.0, 0.0), (4.0, 3.0)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 2e-13), (torch.float32, 2e-6), (torch.bfloat16, 1.2e-2)])
def test_log_probabilities_and_entropies(loss, algorithm, vocab, count, logit_scale, softcap, dtype, bound):
    """Logits reach +-80; in low precision such logits are rounded as much in a whole row."""
    problem = _requests(loss, vocab, dtype, logit_scale)
    expected = _reference(*problem, loss, softcap)
    found = _sharded(*problem, count, algorithm, loss, softcap)
    logits = (problem[0] @ problem[1].t()).double()
    if logit_scale > 4:
        assert logits.abs().max() > 80 or vocab < 50
        if dtype != torch.float64:  # An exponential has the logit's absolute error as its relative error.
            bound = 40 * bound / loss.temperature
    for name, value, reference in zip(("loss", "dX", "dW", "entropy"), found, expected, strict=False):
        assert _distance(value, reference) <= bound, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_large_logits_are_no_farther_from_fp64_than_those_of_a_whole_row(dtype, temperature):
    """Both start from the same GEMM in the model's dtype."""
    loss = TokenLoss(temperature=temperature, entropy=True)
    x, weight, labels, row_gradient = _problem(64, dtype, logit_scale=25.0)
    found = _sharded(x, weight, labels, row_gradient, 3, "vocab-1", loss)
    logits = (x @ weight.t()).float() / temperature
    exact = torch.log_softmax((x @ weight.t()).double() / temperature, -1)
    whole = torch.log_softmax(logits, -1)
    entropies = logits.logsumexp(-1) - (whole.exp() * logits).sum(-1)  # as slime computes them
    place = torch.arange(TOKENS), labels
    pairs = (-found[0], whole[place], exact[place]), (found[3], entropies, -(exact.exp() * exact).sum(-1))
    for ours, plain, reference in pairs:
        assert (ours.double() - reference).abs().max() <= (plain.double() - reference).abs().max() * 1.01


def test_impossible_tokens_leave_the_entropy_finite():
    x = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]])
    statistics, *_ = EagerOperations().exponentiate_(x.clone(), torch.tensor([0]), 0, 1.0, entropy=True)
    empty, total = statistics.new_tensor([[-torch.inf], [0], [0], [0]]), torch.empty_like(statistics)
    EagerOperations().fold_(total, torch.stack([statistics, empty]))
    expected = torch.distributions.Categorical(logits=x[:, :2]).entropy()
    torch.testing.assert_close(GlobalStatistics(*total).entropy_n, expected)


@pytest.mark.parametrize("algorithm", ["vocab-1", "vocab-2"])
def test_sure_model_keeps_its_small_gradient(algorithm):
    # The target's probability is within 1e-3 of one: c E - 1 from a bf16 E would be rounding noise, or zero.
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(24, HIDDEN, generator=generator).bfloat16()
    labels = torch.randint(24, (TOKENS,), generator=generator)
    x = (weight[labels].float() * 0.75).bfloat16()
    row_gradient = torch.ones(TOKENS)
    # The fp64 reference starts from the logits as the bf16 GEMM rounds them.
    logits = (x @ weight.t()).double().requires_grad_()
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    _, input_gradient, weight_gradient = _sharded(x, weight, labels, row_gradient, 3, algorithm)
    assert _distance(input_gradient, logits.grad @ weight.double()) < 1e-2
    assert _distance(weight_gradient, logits.grad.t() @ x.double()) < 1e-2


def test_label_outside_the_vocabulary_has_no_target():
    x, weight, labels, row_gradient = _problem(50, torch.float64)
    labels[3] = 50
    losses, _, _ = _sharded(x, weight, labels, row_gradient, 3, "vocab-2")
    torch.testing.assert_close(losses[3], torch.logsumexp(x[3] @ weight.t(), 0))


def test_an_empty_shard_leaves_the_digits_of_logits_far_below_zero():
    x, weight, labels, row_gradient = _problem(9, torch.float32)
    x, weight = x.abs(), weight.abs() - 40
    losses, *_ = _sharded(x, weight, labels, row_gradient, 4, "vocab-2")
    torch.testing.assert_close(losses.double(), _reference(x, weight, labels, row_gradient)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_add_up(dtype):
    x, weight, labels, row_gradient = _problem(50, dtype)
    parameter = torch.nn.Parameter(weight)
    parameter.main_grad, layer, found = torch.zeros(weight.shape), OutputLayer(parameter, VocabShards(50, 1), 0), []
    for _ in range(2):
        pending = layer(x, labels)
        layer.t_pass(pending, GlobalStatistics(*pending.statistics_3n), row_gradient, input_gradient=False)
        found.append(parameter.main_grad.clone())
    torch.testing.assert_close(found[1], 2 * found[0])


def test_logits_far_from_zero_do_not_overflow():
    x, weight, labels, row_gradient = _problem(50, torch.float32, logit_scale=200.0)
    losses, input_gradient, weight_gradient = _sharded(x, weight, labels, row_gradient, 3, "vocab-2")
    expected = _reference(x, weight, labels, row_gradient)
    for value, reference in zip((losses, input_gradient, weight_gradient), expected, strict=False):
        assert torch.isfinite(value).all()
        assert _distance(value, reference) < 1e-5


@pytest.mark.parametrize("algorithm", ["vocab-1", "vocab-2"])
@pytest.mark.parametrize(("mean", "fits"), [(2.0, True), (20.0, False)])
def test_in_fp16_the_unscaled_product_fits_or_shows(algorithm, mean, fits):
    """A softmax that is uniform over 4096 rows of a shard, whose mean is far from zero: E W is 4096 times the mean."""
    x, weight, labels, row_gradient = _problem(8192, torch.float64)
    x, weight = 1e-3 * x, weight + mean
    x[:, -1] -= x.sum(-1)  # orthogonal to the mean: the logits stay near each other
    problem = x.half(), weight.half(), labels, row_gradient
    _, input_gradient, _ = _sharded(*problem, 2, algorithm)
    if not fits:  # not a wrong number: the loss scaler sees it
        assert not torch.isfinite(input_gradient).any()
        return
    # Every shard's part and their sum are rounded beside the mean, which the whole gradient is without.
    assert _distance(input_gradient, _reference(*problem)[1]) < 2 * mean * 2**-10
