"""Check the properties of every schedule, derived from the table of passes and not from the package's own graph."""

from itertools import pairwise

from megatron_vp.schedule import FAMILIES, VocabMethod


def memory_bound(schedule):
    """Most microbatches each rank may hold, as the record of the schedule's family promises."""
    p, v = schedule.pipeline_size, schedule.chunks
    promise = FAMILIES[schedule.name].promised_peak
    return [promise(p, rank, v, schedule.microbatches, schedule.vocab) / v for rank in range(p)]


def assert_follows_the_table(timeline):
    schedule, comm = timeline.schedule, timeline.costs.comm
    stages, ranks = schedule.placement.stages, range(schedule.pipeline_size)
    start, end = {}, {}
    for rank, (order, spans) in enumerate(zip(schedule.ranks, timeline.spans, strict=True)):
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))
        for step, span in zip(order, spans, strict=True):
            key = (step.kind.value, rank, step.microbatch, step.chunk)
            assert key not in start
            start[key], end[key] = span

    def on(kind, microbatch, stage):
        rank, chunk = schedule.placement.rank_of(stage), schedule.placement.chunk_of(stage)
        whole = "BW", rank, microbatch, chunk
        return whole if kind == "B" and whole in start else (kind, rank, microbatch, chunk)

    def everywhere(kind, microbatch):
        return [(kind, rank, microbatch, 0) for rank in ranks]

    def follows(later, earlier, latency=comm):
        for one in earlier:
            assert start[later] >= end[one] + latency - 1e-9, (later, one)

    for i in range(schedule.microbatches):
        for stage in range(1, stages):
            for kind, later, earlier in (("F", stage, stage - 1), ("B", stage - 1, stage)):
                here, before = on(kind, i, later), on(kind, i, earlier)
                follows(here, [before], comm if here[1] != before[1] else 0)
        if schedule.split_backward:
            for stage in range(stages):
                if on("BW", i, stage) not in start:
                    follows(on("W", i, stage), [on("B", i, stage)], 0)
        last_forward, last_backward = on("F", i, stages - 1), on("B", i, stages - 1)
        follows(last_backward, [last_forward], 0)
        if schedule.vocab is VocabMethod.INTERLACED:
            assert len({start[one] for one in everywhere("V", i)}) == 1
            follows(("V", 0, i, 0), [last_forward])
            follows(last_backward, everywhere("V", i), 0)
        elif schedule.vocab is not VocabMethod.NONE:
            follows(on("F", i, 0), everywhere("IF", i))
            for rank in ranks:
                follows(("S", rank, i, 0), [last_forward])
                follows(("T", rank, i, 0), everywhere("S", i))
                follows(("IB", rank, i, 0), [on("B", i, 0)])
            follows(last_backward, everywhere("T" if schedule.vocab is VocabMethod.VOCAB_1 else "S", i))


def assert_keeps_the_embedding_near(schedule):
    """At most two embedded microbatches wait on the first stage, at most four embedding gradients on any rank."""
    first, chunk = schedule.placement.first_rank, schedule.placement.chunk_of(0)
    order = list(map(str, schedule.ranks[first]))
    suffix = f".{chunk}" if chunk else ""
    for i in range(2, schedule.microbatches):
        assert order.index(f"IF{i}") > order.index(f"F{i - 2}{suffix}")
    for i in range(4, schedule.microbatches):
        backward = next(step for step in (f"B{i}{suffix}", f"BW{i}{suffix}") if step in order)
        assert order.index(f"IB{i - 4}") < order.index(backward)
