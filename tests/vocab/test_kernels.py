"""Test the Triton kernels against fp64, on a GPU or, without one, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

triton = pytest.importorskip("triton", reason="Triton is not installed")

from megatron_vp.vocab import operations, output  # noqa: E402
from megatron_vp.vocab.kernels import gradient_rows, rows, softmax  # noqa: E402
from megatron_vp.vocab.loss import CROSS_ENTROPY, Derivative, GlobalStatistics, TokenLoss, smallest_scale  # noqa: E402
from megatron_vp.vocab.operations import EagerOperations, fused_operations  # noqa: E402
from tests.vocab.test_output import DEPENDS, _distance, _reference, _requests, _sharded  # noqa: E402

# Half a unit in the last place; the interpreter cuts numbers off where a GPU rounds them, which may cost a whole one.
ROUNDING = {
    dtype: epsilon * (1 if DEVICE == "cuda" else 2)
    for dtype, epsilon in ((torch.float32, 2**-24), (torch.bfloat16, 2**-8), (torch.float16, 2**-11))
}


def _random(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(DEVICE, dtype)


# Widths of one to five pieces, whole and cut off, on and off the unit of 16 bytes; pieces and rows that are read twice.
WIDTHS = [1, 7, 512, 1500, 2048 + 8, 9536 // 4, 4096, 6207, 6208, 16384 + 64, 32768 + 64]


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("target_weight", "logit_weight"), [(1.0, 0.0), (0.9, 1e-3)])
def test_exponentiate_at_every_width_as_the_eager_one(columns, dtype, target_weight, logit_weight):
    logits = _random(3, columns, dtype=dtype, scale=4)
    labels = torch.tensor([10, 10 + columns - 1, 9], device=DEVICE)
    found, expected = logits.clone(), logits.double()
    eager = EagerOperations().exponentiate_(expected, labels, 10, target_weight, logit_weight)
    fused = softmax.exponentiate_(found, labels, 10, target_weight, logit_weight)
    assert torch.equal(fused[1], eager[1])
    torch.testing.assert_close(fused[0].double(), eager[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(fused[2].double(), eager[2], rtol=0, atol=0)
    torch.testing.assert_close(found.double(), expected, rtol=ROUNDING[dtype] + 1e-6, atol=1e-7)


@pytest.mark.parametrize("columns", [1, 1500, 4096, 6208, 32768 + 64])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("scale", "softcap"), [(4, 30.0), (40, 3.0), (0.01, 30.0)])
def test_exponentiate_capped_logits_as_the_eager_one(columns, dtype, scale, softcap):
    logits = _random(3, columns, dtype=dtype, scale=scale)
    labels = torch.tensor([10, 10 + columns - 1, 9], device=DEVICE)
    found, expected = logits.clone(), logits.double()
    eager = EagerOperations().exponentiate_(expected, labels, 10, 1.0, softcap=softcap)
    fused = softmax.exponentiate_(found, labels, 10, 1.0, softcap=softcap)
    assert torch.equal(fused[1], eager[1])
    torch.testing.assert_close(fused[0].double(), eager[0], rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(fused[2].double(), eager[2], rtol=2e-6, atol=0)
    # Where the cap is nearly flat, the slope is a small difference of numbers near one.
    torch.testing.assert_close(found.double(), expected, rtol=ROUNDING[dtype] + 1e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [7, 1500, 2048 + 8, 6208, 32768 + 64])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("temperature", "softcap", "entropy"), [(0.3, 0.0, False), (2.0, 0.0, True), (0.7, 30.0, True)]
)
def test_exponentiate_as_requested_as_the_eager_one(columns, dtype, temperature, softcap, entropy):
    logits = _random(3, columns, dtype=dtype, scale=4)
    logits[1, 1:5] = -torch.inf
    labels = torch.tensor([10, 10 + columns - 1, 9], device=DEVICE)
    found, expected = logits.clone(), logits.double()
    given = (labels, 10, 1.0, 0.0, softcap, temperature)
    eager = EagerOperations().exponentiate_(expected, *given, entropy=entropy, slope=False)
    fused = softmax.exponentiate_(found, *given, entropy=entropy, slope=False)
    assert torch.equal(fused[1], eager[1])
    torch.testing.assert_close(fused[0].double(), eager[0], rtol=5e-6, atol=2e-5)
    torch.testing.assert_close(fused[2].double(), eager[2], rtol=2e-6, atol=0)
    torch.testing.assert_close(found.double(), expected, rtol=ROUNDING[dtype] + 2e-5, atol=1e-6)


@pytest.mark.parametrize("statistics", [3, 4])
def test_fold(statistics):
    tokens = softmax.TOKENS_A_PROGRAM + 3
    more = _random(1, tokens)[0].abs(), _random(tokens, 1)[:, 0], -_random(2, tokens)[0].abs()
    gathered = torch.stack([_random(tokens, scale=5), *more])[:statistics].repeat(5, 1, 1)
    gathered[:, 0] += torch.arange(5, device=DEVICE)[:, None] * 30.0  # some sums vanish beside others
    empty = torch.tensor([-torch.inf, 0, 0, 0], device=DEVICE)[:statistics]
    gathered[3] = empty[:, None]
    gathered[:, :, 7] = empty
    found = torch.empty(statistics, tokens, device=DEVICE)
    expected = found.double()
    softmax.fold_(found, gathered)
    EagerOperations().fold_(expected, gathered.double())
    assert torch.equal(found[:, 7], empty)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.fixture
def sparse(tmp_path):
    """Makes bf16 zeros of a size that 32 bits cannot count; on CPU memory is taken where something is written."""
    if DEVICE == "cuda":
        return lambda size: torch.zeros(size, dtype=torch.bfloat16, device=DEVICE)
    return lambda size: torch.from_file(str(tmp_path / "memory"), shared=True, size=size, dtype=torch.bfloat16)


def test_logits_beyond_32_bits(sparse):
    stride = 2**30
    # Memory ahead of the logits, too, for addresses that have become negative.
    logits = sparse(5 * stride + 8).as_strided((4, 8), (stride, 1), 2 * stride)
    logits.copy_(_random(4, 8, dtype=torch.bfloat16))
    expected, labels = logits.clone(), torch.tensor([-1, -1, -1, 5], device=DEVICE)
    for found, beside in zip(_passed(logits, labels), _passed(expected, labels), strict=True):
        assert torch.equal(found, beside)
    assert torch.equal(logits, expected)


def _passed(logits, labels):
    """What the last kernel of S and the one of T return; both have written to the logits."""
    found = softmax.exponentiate_(logits, labels, 0, 1.0)
    statistics, target, target_logit = found
    terms = _terms(statistics[0], target, target_logit)
    return *found, gradient_rows.enter_targets_(
        logits, torch.ones(4, 3, device=DEVICE), torch.ones(4, device=DEVICE), terms
    )


def _terms(largest, target, target_logit, total=None, loss=CROSS_ENTROPY):
    """c = e = 1 where there is nothing else to go by."""
    if total is None:
        total = GlobalStatistics(torch.zeros_like(largest), torch.ones_like(largest), torch.zeros_like(largest))
    return Derivative(largest, target, target_logit, total, loss, vocab_size=1000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("main_dtype", [torch.float32, None])
# Not on CPU, where PyTorch's `addmm` has no output of another dtype.
@pytest.mark.parametrize("inside_the_gemm", [False] if DEVICE == "cpu" else [True, False])
def test_add_product(monkeypatch, dtype, main_dtype, inside_the_gemm):
    monkeypatch.setattr(operations, "ADDS_INTO_FP32", inside_the_gemm)
    matrix = _random(130, 60, dtype=main_dtype or dtype)
    left, right = _random(77, 130, dtype=dtype), _random(77, 60, dtype=dtype)
    expected = matrix.double() + left.double().t() @ right.double()
    fused_operations().add_product_(matrix, left, right)
    exact = inside_the_gemm and main_dtype == torch.float32
    assert _distance(matrix, expected) < (1e-6 if exact else ROUNDING[dtype])


def _rows_of_d(tokens, columns, loss):
    """Statistics whose c is ordinary, small, and too small to leave a row to X, with and without a target here."""
    total = GlobalStatistics(
        _random(tokens, scale=3), 1 + _random(tokens, 1)[:, 0].abs(), torch.zeros(tokens, device=DEVICE)
    )
    below = torch.tensor([0.0, 3.0, 20.0, 80.0], device=DEVICE).repeat(tokens)[:tokens]
    largest = total.max_n - below
    target = torch.tensor([-1, 0, columns - 1, 3, 5, 7], device=DEVICE).repeat(tokens)[:tokens]
    target_logit = torch.where(target >= 0, largest - 0.5, 0)
    return _terms(largest, target, target_logit, total, loss)


LOSSES = [CROSS_ENTROPY, TokenLoss(label_smoothing=0.1, z_loss=0.05)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_rescale(dtype, loss):
    tokens, hidden, vocab = 12, gradient_rows.BLOCK + 7, 11
    product, weight = _random(tokens, hidden, dtype=dtype), _random(vocab, hidden, dtype=dtype)
    terms = _rows_of_d(tokens, vocab, loss)
    expected = product.double() * terms.scale_n.double()[:, None]
    for token, column in enumerate(terms.target_n.tolist()):
        if column >= 0:
            expected[token] += terms.entry_n[token].double() * weight[column].double()
    gradient_rows.rescale_(product, weight, terms)
    torch.testing.assert_close(product.double(), expected, rtol=ROUNDING[dtype] + 1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_enter_targets(dtype, loss):
    tokens, hidden, columns = 12, gradient_rows.BLOCK + 1, gradient_rows.BLOCK + 9
    exp, x = _random(tokens, columns, dtype=dtype).abs(), _random(tokens, hidden, dtype=dtype)
    terms, row_gradient = _rows_of_d(tokens, columns, loss), _random(tokens).abs() + 0.1
    scale, entry, target = terms.scale_n.double(), terms.entry_n.double(), terms.target_n
    owned = (target >= 0).nonzero().squeeze(-1)
    exp[owned, target[owned]] = 0
    rows_of_d = exp.double() * scale[:, None]
    rows_of_d[owned, target[owned]] = entry[owned]
    for each in (EagerOperations(), fused_operations()):
        entered = exp.clone()
        weighed = each.enter_targets_(entered, x, row_gradient, terms)
        # What is taken over is known: where c is too small the row is D's, elsewhere X has c.
        taken = torch.isin(torch.arange(tokens, device=DEVICE), owned) & (scale < smallest_scale(dtype))
        assert taken.any() and not taken.all()
        left = torch.where(taken, 1, scale)
        torch.testing.assert_close(
            weighed.double(), x.double() * (left * row_gradient)[:, None], rtol=2 * ROUNDING[dtype] + 2e-6, atol=1e-7
        )
        torch.testing.assert_close(
            entered.double() * left[:, None], rows_of_d, rtol=2 * ROUNDING[dtype] + 2e-6, atol=1e-7
        )


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_add_rows(main_dtype):
    tokens, hidden = 40, rows.BLOCK + 3
    matrix, source = _random(9, hidden, dtype=main_dtype), _random(tokens, hidden, dtype=torch.bfloat16)
    row = torch.randint(-2, 9, (tokens,), generator=torch.Generator().manual_seed(1)).clamp(-1).to(DEVICE)
    row[:12] = 4  # a word that comes often
    expected = matrix.double()
    for token in range(tokens):
        if row[token] >= 0:
            expected[row[token]] += source[token].double()
    again = matrix.clone()
    rows.add_rows_(matrix, row, source)
    rows.add_rows_(again, row, source)
    assert torch.equal(matrix, again)
    torch.testing.assert_close(matrix.double(), expected, rtol=ROUNDING[main_dtype], atol=1e-5)


# Lengths of runs of equal rows, against segments of four: inside one, up to its end, over several, all of them.
@pytest.mark.parametrize("runs", [[1, 2, 1, 4, 4], [3, 2, 7, 9, 1], [4, 5, 12, 3], [8, 8, 1], [23], [1]])
@pytest.mark.parametrize("left_out", [0, 3])
def test_add_rows_whose_equal_rows_lie_in_several_segments(monkeypatch, runs, left_out):
    monkeypatch.setattr(rows, "SEGMENT", 4)
    counts = torch.tensor([left_out, *runs])
    row = torch.repeat_interleave(torch.arange(len(counts)), counts) - 1
    row = row[torch.randperm(len(row), generator=torch.Generator().manual_seed(0))].to(DEVICE)
    matrix, source = _random(len(runs), 3), _random(len(row), 3)
    expected = matrix.double()
    expected.index_add_(0, row.clamp(0), (source * (row >= 0)[:, None]).double())
    rows.add_rows_(matrix, row, source)
    torch.testing.assert_close(matrix.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "loss"), [("vocab-1", CROSS_ENTROPY), ("vocab-2", CROSS_ENTROPY), ("vocab-1", DEPENDS)]
)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_a_vocabulary_on_kernels_alone(monkeypatch, algorithm, loss, softcap):
    """S and T of all shards: uneven, one empty."""
    monkeypatch.setattr(output, "operations_for", lambda tensor: fused_operations())
    problem = [tensor.to(DEVICE) for tensor in _requests(loss, 9, torch.float32)]
    expected = _reference(*problem, loss, softcap)
    for found, reference in zip(_sharded(*problem, 4, algorithm, loss, softcap), expected, strict=False):
        assert _distance(found, reference) < (2e-6 if loss.entropy else 1e-6)
