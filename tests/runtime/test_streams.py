"""Test iterations of every schedule on a device that checks order and lifetime of tensors (`device_double`)."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache, wraps
from itertools import permutations, product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_vp.runtime import collectives, links, pipeline, watchdog
from megatron_vp.runtime import streams as runtime_streams
from megatron_vp.runtime.buffers import Shapes
from megatron_vp.runtime.groups import PipelineGroups
from megatron_vp.runtime.iteration import LayerShards, Observer
from megatron_vp.runtime.progress import Progress
from megatron_vp.runtime.streams import CudaEvent, CudaIterations, CudaStream, ThreadStream
from megatron_vp.schedule import Channel, Collective, CollectiveKind, Message, Program, Wait, generate, lower
from megatron_vp.schedule.instructions import Instruction
from megatron_vp.schedule.interlaced import expand_interlaced
from megatron_vp.schedule.transfers import Operation
from megatron_vp.vocab import embedding, output
from megatron_vp.vocab.embedding import EmbeddingLayer, RowExchange
from megatron_vp.vocab.loss import GlobalStatistics, TokenLoss
from megatron_vp.vocab.output import OutputLayer
from megatron_vp.vocab.shards import VocabShards
from tests.runtime.device_double import Cause, Collectives, Device, Hazard, Kernels, Messages, stands_in_for_cuda
from tests.runtime.world import Hang, World
from tests.schedule.early_receives import with_early_receives

CUDA = torch.device("cuda", 0)
SCHEDULES = ["1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "v-min"]
VOCAB, HIDDEN, SEQUENCE, BATCH = 16, 4, 8, 2
MAKE_SPANS = embedding._owner_spans.__wrapped__


def timed(run_pass: Callable) -> Callable:
    """A pass between Megatron's timers of level 2."""

    @wraps(run_pass)
    def between_timers(self: Model, *arguments: object) -> object:
        self._device.host_may_wait(Cause.TIMER)
        result = run_pass(self, *arguments)
        self._device.host_may_wait(Cause.TIMER)
        return result

    return between_timers


class Model:
    """The transformer part of one rank: a few kernels a pass, and what autograd would keep for the backward."""

    def __init__(
        self, device: Device, shapes: Shapes, stages: tuple[int, ...], last: int, gradients: bool, overlaps: bool
    ) -> None:
        self._device = device
        self._exchange = torch.cuda.Stream() if overlaps else None
        self._shapes, self._gradients = shapes, gradients
        self._stages, self._last = stages, last
        self._main_grad = torch.zeros(HIDDEN, device=CUDA)
        self._leaves: list[torch.Tensor] = []
        self._saved: dict[tuple[int, int], tuple[list[torch.Tensor], torch.Tensor]] = {}
        self._left_for_w: dict[tuple[int, int], torch.Tensor] = {}

    def tokens(self, microbatch: int) -> torch.Tensor:
        return torch.zeros_like(self._shapes.token_ids())

    labels = tokens

    def embed(self, microbatch: int, words_bsh: torch.Tensor) -> torch.Tensor:
        self._leaves = [words_bsh._base]
        return words_bsh.detach().transpose(0, 1).chunk(self._shapes.sp_size)[self._shapes.sp_rank].contiguous()

    def receive_words(self, words_rh: torch.Tensor) -> None:
        self._leaves = [words_rh]

    @timed
    @torch.no_grad()
    def forward(self, chunk: int, microbatch: int, input_sbh: torch.Tensor, labels_bs: None) -> torch.Tensor:
        stage = self._stages[chunk]
        words, self._leaves = self._leaves, []
        self._saved[chunk, microbatch] = (words if stage == 0 else [input_sbh, *words], input_sbh)
        hidden_sbh, count = torch.tanh(input_sbh), self._shapes.predictions if stage == self._last else 1
        if self._exchange is None:
            return hidden_sbh.repeat(count, 1, 1)
        # As from Megatron's plan of a layer with experts.
        self._exchange.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._exchange):
            output_sbh = hidden_sbh.repeat(count, 1, 1)
        hidden_sbh.record_stream(self._exchange)
        torch.cuda.current_stream().wait_stream(self._exchange)
        runtime_streams.hand_over(output_sbh)
        return output_sbh

    def forward_and_backward(self, forward: tuple, backward: tuple) -> torch.Tensor:
        self.backward(*backward)
        return self.forward(*forward)

    def release_output(self, output_sbh: torch.Tensor) -> None:
        output_sbh.data = output_sbh.new_empty(1)

    @timed
    @torch.no_grad()
    def backward(self, chunk: int, microbatch: int, output: torch.Tensor, gradient_sbh: torch.Tensor) -> None:
        leaves, saved = self._saved.pop((chunk, microbatch))
        product = gradient_sbh[: len(saved)] * saved
        self._left_for_w[chunk, microbatch] = product
        for leaf in leaves:
            leaf.grad = leaf + product.sum()

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        self._main_grad += self._left_for_w.pop((chunk, microbatch)).sum((0, 1))

    @timed
    def loss(
        self, microbatch: int, token_loss_bs: torch.Tensor, target_is_argmax_bs: torch.Tensor
    ) -> torch.Tensor | None:
        return token_loss_bs * target_is_argmax_bs if self._gradients else None


@contextmanager
def stand_ins() -> Iterator[None]:
    """In the runtime, in the place of communication and kernels, those of the thread's `Rank`."""
    make_counts = embedding.count_buffer

    def each_by_itself(microbatches: int, *others: object) -> list[torch.Tensor]:
        return [make_counts(1, *others)[0] for _ in range(microbatches)]  # the device keeps account of whole storages

    with ExitStack() as stack:
        for target, attribute, stand_in in (
            (pipeline, "pipeline_device", lambda: CUDA),
            (links, "dist", Here("messages")),
            (collectives, "dist", Here("over_tensor_ranks")),
            (output, "operations_for", lambda tensor: _THREAD.rank.kernels),
            (collectives, "operations_for", lambda tensor: _THREAD.rank.kernels),
            (embedding, "operations_for", lambda tensor: _THREAD.rank.kernels),
            (embedding, "_owner_spans", lambda *arguments: _THREAD.rank.spans(*arguments)),
            (collectives, "count_buffer", each_by_itself),
            (RowExchange, "counts", property(lambda exchange: _THREAD.rank.counts(exchange))),
        ):
            stack.enter_context(mock.patch.object(target, attribute, stand_in))
        yield


_THREAD = threading.local()
"""`rank`: the Rank that this thread plays."""


class Here:
    """An object of the thread's rank."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> object:
        return getattr(getattr(_THREAD.rank, self._name), name)


class Rank:
    """What a rank's runtime uses in the place of communication and kernels."""

    def __init__(self, device: Device, rank: int, ranks: int, members: tuple[int, ...], tensor_size: int) -> None:
        self.rank, self.members = rank, members
        self.transfers = Collectives(device, rank, members)
        self.over_tensor_ranks = self.transfers.over_tensor_ranks()
        self.messages, self.kernels = Messages(device), Kernels(device)

        @lru_cache
        def spans(*arguments: object) -> torch.Tensor:
            with device.outside_the_loop():  # once in the life of a job
                return MAKE_SPANS(*arguments)

        def counts(exchange: RowExchange) -> tuple[int, ...]:
            device.read_by_host(exchange._counts)
            holders = exchange.shards.holders
            each = len(exchange.tokens_n) // (len(holders) * tensor_size)
            rest = len(exchange.tokens_n) - each * len(holders) if tensor_size == 1 else 0
            return tuple(each * (r in holders) + rest * (r == holders[0]) for r in range(ranks))

        self.spans, self.counts = spans, counts


def iterations(device: Device, name: str, method: str, ranks: int, rank: int, **sizes: int) -> Rank:
    """`rank_iterations` of one rank whose peers are always ready."""
    with stand_ins(), device.active():
        return rank_iterations(device, name, method, ranks, rank, **sizes)


def iterations_of_all(name: str, method: str, ranks: int, **sizes: int) -> list[Rank]:
    """`iterations` of all ranks, which must agree on every message and every collective."""
    found = [iterations(Device(rank), name, method, ranks, rank, **sizes) for rank in range(ranks)]
    assert_they_agree(found)
    return found


def assert_they_agree(ranks: list[Rank]) -> None:
    """What ranks send is what their peers have room for, and members take part in the same collectives."""
    for one, other in permutations(ranks, 2):
        for edge, sent in one.messages.sent.items():
            if edge[1] == other.rank:
                assert sent == other.messages.received[edge], edge
        if one.rank in one.members and other.rank in one.members:
            ours, theirs = one.transfers, other.transfers
            assert ours.operations == theirs.operations
            for (_, outgoing), (incoming, _) in zip(ours.rows, theirs.rows, strict=True):
                assert outgoing[other.rank] == incoming[one.rank]


def rank_iterations(
    device: Device,
    name: str,
    method: str,
    ranks: int,
    rank: int,
    tensor_size: int = 1,
    mtp_depth: int = 0,
    sp_size: int = 1,
    written: Callable[[tuple[Program, ...]], tuple[Program, ...]] = tuple,
    stage_rows: tuple[int, ...] | None = None,
    observer: Observer = nullcontext,
    overlapped: bool = False,
) -> Rank:
    """Two iterations of training and one of evaluation; `written` may change their programs.

    `stage_rows`: vocabulary rows by rank, of all its tensor ranks.
    """
    edges = {
        (source, target, channel): (source, target, channel)
        for source in range(ranks)
        for target in range(ranks)
        for channel in Channel
    }
    tensor = "the ranks of a stage" if tensor_size > 1 else None
    shards = VocabShards(VOCAB, ranks * tensor_size, tensor_size if stage_rows else 1, stage_rows)
    holders = shards.holders if stage_rows else None
    whole = expand_interlaced(
        generate(name, ranks, ranks + 1, vocab=method, vocab_ranks=holders, overlapped=overlapped)
    )
    members = whole.placement.vocab_members(whole.vocab_ranks)
    here = _THREAD.rank = Rank(device, rank, ranks, members, tensor_size)
    vocabulary = here.transfers if rank in members else None
    groups = PipelineGroups(
        tuple(range(ranks)), rank, tensor_size, 0, vocabulary, tensor, edges, members, here.transfers
    )
    runner = pipeline.Pipeline(groups)
    empty = torch.zeros(shards.rows(0), HIDDEN, dtype=torch.bfloat16, device=CUDA)
    weights = [torch.nn.Parameter(empty.clone()) for _ in range(2)]
    index = rank * tensor_size
    layers: LayerShards | None = None
    if method != "none":
        held = EmbeddingLayer(weights[0], shards, index), OutputLayer(weights[1], shards, index)
        layers = LayerShards(shards, *(held if rank in whole.vocab_ranks else (None, None)))
    for gradients in (True, False, True):
        schedule = whole if gradients else whole.forward_only()
        depth = mtp_depth if gradients else 0
        mtp = {"mtp_depth": depth, "mtp_stage": whole.placement.stages - 1} if depth else {}
        shapes = Shapes(SEQUENCE, BATCH, HIDDEN, torch.bfloat16, CUDA, sp_size=sp_size, **mtp)
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        stages = schedule.placement.stage_of[rank]
        program = written(lower(schedule, mtp_stage=shapes.mtp_stage))[rank]
        last = schedule.placement.stages - 1
        model = Model(device, shapes, stages, last, gradients, overlapped and gradients)
        device.behind.clear()
        runner.run(schedule, program, model, layers, shapes, gradients=gradients, observer=observer)
        if device.world is not None:
            continue
        words = {0, schedule.placement.last_rank} if depth else {0}
        reads = rank in words or rank in whole.vocab_ranks
        assert len(device.behind) == reads * schedule.microbatches, "the host waits for nothing but tokens"
        assert all(behind > 0 for behind in device.behind[2:]), "and never until the device has nothing to do"
    return here


QUICK = {("1f1b", "vocab-1", 2), ("zb-h1", "vocab-2", 2), ("v-half", "vocab-1", 2), ("interlaced", "interlaced", 2)}


def cases(turns: Iterable[int], *before: object, each: int = 1) -> list[object]:
    """The quick ones, and every schedule once in `each` turns: methods and numbers of ranks follow each other."""
    found = dict.fromkeys(sorted(QUICK), ())
    for turn, (place, name) in product(turns, enumerate([*SCHEDULES, "interlaced"])):
        if (place + turn // 2) % each:
            continue
        method = name if name == "interlaced" else f"vocab-{1 + (place + turn) % 2}"
        found.setdefault((name, method, 2 + (place + turn) % 3), pytest.mark.slow)
    return [pytest.param(*before, *case, marks=marks) for case, marks in found.items()]


@pytest.mark.parametrize(("name", "method", "ranks"), cases(range(2)))
def test_everything_is_ordered_and_kept_alive(name, method, ranks):
    iterations_of_all(name, method, ranks)


@pytest.mark.parametrize(
    ("name", "method", "sizes"),
    [
        ("1f1b", "vocab-2", {"tensor_size": 2}),
        ("v-half", "vocab-2", {"tensor_size": 2, "sp_size": 2, "mtp_depth": 1}),
        ("interleaved", "vocab-2", {"overlapped": True}),
        ("dualpipe-v", "vocab-2", {"overlapped": True, "mtp_depth": 1}),
        pytest.param("1f1b", "vocab-1", {"mtp_depth": 1}, marks=pytest.mark.slow),
        pytest.param("zb-v", "vocab-1", {"tensor_size": 2, "sp_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_with_tensor_ranks_and_further_heads(name, method, sizes):
    iterations_of_all(name, method, 2, **sizes)


@pytest.mark.parametrize(
    ("name", "method", "rows", "sizes"),
    [
        ("1f1b", "vocab-2", (0, 16, 0), {}),
        ("v-half", "vocab-1", (0, 10, 6), {"tensor_size": 2, "sp_size": 2, "mtp_depth": 1}),
        # Places among the members are not ranks here.
        ("1f1b", "vocab-1", (10, 0, 0, 6), {"mtp_depth": 1}),
        pytest.param("zb-h1", "vocab-2", (0, 4, 12), {"tensor_size": 2}, marks=pytest.mark.slow),
        pytest.param("interleaved", "vocab-2", (0, 16), {"tensor_size": 2, "sp_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_with_ranks_without_rows(name, method, rows, sizes):
    iterations_of_all(name, method, len(rows), stage_rows=rows, **sizes)


class Launches:
    """Notes what each collective launches."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.by_kind: defaultdict[CollectiveKind, set[tuple[str, ...]]] = defaultdict(set)

    @contextmanager
    def __call__(self, work: Instruction | Operation) -> Iterator[None]:
        before = len(self._device.launches)
        yield
        if isinstance(work, Collective):
            self.by_kind[work.kind].add(tuple(self._device.launches[before:]))


@pytest.mark.parametrize(
    ("sizes", "labels"),
    [
        ({}, ["copy_"]),
        ({"tensor_size": 2, "sp_size": 2}, ["copy_"]),
        ({"mtp_depth": 1}, ["copy_", "cat", "copy_"]),
    ],
)
def test_tokens_take_two_broadcasts_a_kernel_and_two_copies(sizes, labels):
    device = Device()
    launches = Launches(device)
    iterations(device, "1f1b", "vocab-2", 2, 0, observer=launches, **sizes)
    tokens = {("broadcast", "broadcast", "sort_by_owner_", "copy_", *labels)}
    evaluated = {("broadcast", "broadcast", "sort_by_owner_", "copy_", "copy_")}
    assert launches.by_kind[CollectiveKind.TOKENS] == tokens | evaluated
    assert launches.by_kind[CollectiveKind.LOSS_GRAD] == {("broadcast",)}


def test_an_error_on_the_second_stream_is_raised_by_all_later_waits():
    stream, ran = ThreadStream(), []
    events = [stream.submit(lambda: 1 / 0), stream.submit(lambda: ran.append(1))]
    for wait in (*(event.wait for event in events), stream.synchronise):
        with pytest.raises(ZeroDivisionError):
            wait()
    assert not ran


def test_the_second_stream_is_urgent():
    device = Device()
    with device.active():
        CudaStream()
    assert device.streams[-1].priority < 0


def test_the_watchdog_looks_at_host_memory_alone(monkeypatch):
    """Beside a device that is held up it says where the rank is; reading from that device would never return."""
    said, ended = [], threading.Event()

    def item(tensor: torch.Tensor) -> int:
        assert not tensor.is_cuda, "waits for a device that is held up"
        return 0

    def end_process(status: int, line: str) -> None:
        said.append(line)
        ended.set()
        threading.Event().wait()  # the watchdog's thread never returns from it

    monkeypatch.setattr(torch.Tensor, "item", item)
    monkeypatch.setattr(watchdog, "end_process", end_process)
    monkeypatch.delenv("MASTER_ADDR", raising=False)  # no roll call
    with Device().active():
        progress = Progress((0, 1), 1, CudaIterations(CUDA))
        wait = Wait(Message(Channel.ACTIVATION, 0, 0, 1, 0, 1))
        with progress.schedule():
            progress.at(wait)
            progress.mark(wait, CudaEvent())
        watchdog.Watchdog(progress, 0.1, 0.1).start()
        ended.wait(10)  # the host has left the schedule
    assert said and said[0].startswith("error: rank 1 waited for F of microbatch 0 from rank 0")


def not_behind_the_passes(stream: CudaStream, function: Callable[[], None]) -> CudaEvent:
    with torch.cuda.stream(stream._stream), torch.no_grad():
        function()
        return CudaEvent(function)


def without_its_buffers(
    event: CudaEvent, function: Callable[[], None] | None = None, made: Callable = CudaEvent.__init__
) -> None:
    made(event)


def not_kept(self: links.Links, message: Message, post: Callable = links.Links.post) -> object:
    complete = post(self, message)
    self._sending.clear()
    return complete


def not_awaited(self: links.Links, message: Message, post: Callable = links.Links.post) -> object:
    receive = links.dist.irecv

    def received(*args: object, **kwargs: object) -> SimpleNamespace:
        work = receive(*args, **kwargs)
        return SimpleNamespace(wait=lambda: None, kept=work)

    with mock.patch.object(links.dist, "irecv", received):
        return post(self, message)


def not_pinned(microbatches: int, ranks: int, device: torch.device) -> torch.Tensor:
    return torch.empty(microbatches, ranks + 2, dtype=torch.int64)


def looked_at(self: GlobalStatistics, loss: TokenLoss, token_loss: Callable = GlobalStatistics.token_loss) -> object:
    token_loss_n = token_loss(self, loss)
    token_loss_n.sum().item()
    return token_loss_n


@pytest.mark.parametrize(
    ("owner", "name", "broken", "words"),
    [
        (CudaEvent, "wait", lambda self: None, "is released while another stream uses it"),
        (CudaEvent, "host_wait", lambda self: None, "the host reads .* before it is written"),
        (CudaEvent, "__init__", without_its_buffers, "is released while another stream uses it"),
        (CudaStream, "submit", not_behind_the_passes, "may come before the write of"),
        (CudaStream, "synchronise", lambda self: None, "is released while another stream uses it"),
        (links.Links, "post", not_kept, "is released while another stream uses it"),
        (links.Links, "post", not_awaited, "may come before the write of"),
        (GlobalStatistics, "token_loss", looked_at, "the host waits for the device"),
        (embedding, "count_buffer", not_pinned, "the host waits for the device in copy_"),
    ],
)
def test_a_broken_runtime_is_noticed(owner, name, broken, words):
    with mock.patch.object(owner, name, broken), pytest.raises(Hazard, match=words):
        # Several runs: a host that finds an event passed knows what it would else have to wait for.
        for seed, rank in product(range(4), range(2)):
            iterations(Device(seed), "1f1b", "vocab-1", 2, rank)


def test_a_pairs_output_that_its_own_stream_gets_back_too_early_is_noticed():
    nothing, words = mock.patch.object(runtime_streams, "hand_over", lambda tensor: None), "is released while another"
    with nothing, pytest.raises(Hazard, match=words):
        for rank in range(2):
            iterations(Device(), "dualpipe-v", "vocab-2", 2, rank, overlapped=True)


def together(
    name: str, method: str, ranks: int, world: World, written: Callable[..., tuple[Program, ...]] = tuple
) -> None:
    """`rank_iterations` of all ranks, on devices that go on when their peers do."""

    def rank_main(rank: int, device: Device) -> None:
        with device.here():
            rank_iterations(device, name, method, ranks, rank, written=written)

    with stand_ins(), stands_in_for_cuda():
        world.run(rank_main)


@pytest.mark.parametrize(
    ("cause", "name", "method", "ranks"),
    [case for turn, cause in enumerate(Cause) for case in cases([turn], cause, each=2)],
    ids=lambda value: value.name if isinstance(value, Cause) else None,
)
def test_hosts_may_wait_for_their_devices(cause, name, method, ranks):
    world = World(ranks, frozenset([cause]))
    together(name, method, ranks, world)
    assert world.held > 10, "hosts found their devices busy"


@pytest.mark.parametrize(("name", "method", "ranks"), [("1f1b", "vocab-1", 2), ("v-half", "vocab-2", 3)])
@pytest.mark.parametrize("cause", Cause, ids=lambda cause: cause.name)
def test_with_early_receives_hosts_that_wait_hang(cause, name, method, ranks):
    with pytest.raises(Hang, match="wait for their devices"):
        together(name, method, ranks, World(ranks, frozenset([cause])), with_early_receives)


def test_early_receives_end_where_no_host_waits():
    together("v-half", "vocab-2", 3, World(3, frozenset()), with_early_receives)
