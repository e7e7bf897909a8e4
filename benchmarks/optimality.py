"""Measure how far the schedules that we generate are from the shortest ones in the same memory.

    python benchmarks/optimality.py [--solve] [--effort 15] [--only zb-v ...] [--write]

The cases are small schedules of every family, with every vocabulary method, equal and unequal costs, with and without
communication. For each case, our makespan is divided by the shortest possible with the same passes, dependencies and
limits. `--solve` finds the shortest with OR-tools' CP-SAT (`pip install 'megatron_vp[optimality]'`) for the cases that
`results/optimality.jsonl` lacks, and adds them there; delete a line to solve its case again. A case takes a second to a
minute on one core. If the solver stops before it has proven the shortest, its lower bound is used, and the ratio is at
most what is printed.

At the end, the script prints the table of docs/evidence/predictions.md. The exit status is 1 if a schedule takes more
than 2 percent over the bound; V-Min and one named cell of the table may take more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_vp.schedule import (
    FAMILIES,
    Costs,
    PassCosts,
    Schedule,
    ScheduleRequest,
    StageCosts,
    VocabMethod,
    simulate,
)
from megatron_vp.schedule.list_scheduler import MemoryLimits

ROOT = Path(__file__).resolve().parents[1]
PLANNED = [name for name, family in FAMILIES.items() if family.planned]
RESULTS = ROOT / "benchmarks" / "results" / "optimality.jsonl"

MOST = 1.02
"""The largest ratio of a makespan to the shortest that is allowed, apart from the exceptions below."""
EXCEPTED = {"v-min": 1.035}
"""The largest ratio allowed for families without slack."""
EXCEPTED_ROWS = {("interleaved", "none", "layers and rows"): 1.03}
"""The largest ratio allowed for an order that Megatron itself runs, without vocabulary passes. It is here for
comparison.
"""

SIZES = {
    "equal": ((2, 8), (3, 6), (4, 8)),
    "uneven": ((2, 8), (3, 6)),
    "large vocabulary": ((2, 8), (3, 6)),
    "communication": ((2, 8), (3, 6)),
    "layers and rows": ((2, 8), (3, 6)),
    "few holders": ((2, 8), (3, 6)),
}
"""The ranks and microbatches for each set of costs."""

ALIKE = {
    "equal": PassCosts(),
    "uneven": PassCosts(F=1, B=1.15, W=0.8, S=0.35, T=0.2, IF=0.02, IB=0.03),
    "large vocabulary": PassCosts(S=0.8, T=0.5),
    "communication": PassCosts(comm=0.05),
}
"""The sets of costs that are equal on all ranks."""


@dataclass(frozen=True)
class Case:
    """A schedule that is compared with the shortest one."""

    name: str
    vocab: str
    ranks: int
    microbatches: int
    costs_name: str

    @property
    def vocab_ranks(self) -> tuple[int, ...] | None:
        """The ranks with vocabulary rows; None for all. With `few holders`, only the second half of the ranks."""
        return tuple(range(self.ranks // 2, self.ranks)) if self.costs_name == "few holders" else None

    @property
    def chunks(self) -> int:
        """The number of chunks per rank."""
        return FAMILIES[self.name].chunks_of(None)

    def costs(self) -> Costs:
        """The costs of passes; `SIZES` lists their names."""
        return ALIKE[self.costs_name] if self.costs_name in ALIKE else self._by_stage()

    def _by_stage(self) -> StageCosts:
        """The costs for stages with unequal layers. The rows are shared so that all ranks with rows work about equally
        long.

        A stage has two layers with F = B = W = 1 / (2 chunks). The last rank has one layer less or, if few ranks hold
        rows, each chunk of a holder has. Whole vocabulary layers take as long as half a layer on the last stage.
        """
        placement = FAMILIES[self.name].placement_of(self.ranks)
        holders = range(self.ranks) if self.vocab_ranks is None else self.vocab_ranks
        layers = [2] * placement.stages
        short = set(holders) if self.vocab_ranks else {self.ranks - 1}
        for rank in short:
            for stage in placement.stage_of[rank][: None if self.vocab_ranks else 1]:
                layers[stage] -= 1
        time = [count / (2 * self.chunks) for count in layers]
        if self.vocab == VocabMethod.NONE:
            head = 0.25 / self.chunks
            F, B = (tuple(t + head * (stage == placement.stages - 1) for stage, t in enumerate(time)) for _ in range(2))
            return StageCosts(F, B, tuple(time))
        rows = tuple((2 if rank in short else 1) * (rank in holders) for rank in range(self.ranks))
        S, T = (tuple(part * count for count in rows) for part in (0.2, 0.15))
        embedding = tuple(0.05 * count for count in rows)
        return StageCosts(tuple(time), tuple(time), tuple(time), S, T, embedding, embedding)

    def request(self) -> ScheduleRequest:
        """The request for the schedule of this case."""
        return ScheduleRequest.of(
            FAMILIES[self.name],
            self.ranks,
            self.microbatches,
            method=VocabMethod(self.vocab),
            costs=self.costs(),
            vocab_ranks=self.vocab_ranks,
        )

    def schedule(self) -> Schedule:
        """The schedule that we generate."""
        return self.request().schedule()

    @property
    def key(self) -> dict[str, object]:
        """The entries that identify the case in the results."""
        return {
            "schedule": self.name,
            "vocab": self.vocab,
            "ranks": self.ranks,
            "microbatches": self.microbatches,
            "costs": self.costs_name,
        }


def cases() -> Iterator[Case]:
    """Yield all cases, for the schedules that training uses."""
    for costs_name, sizes in SIZES.items():
        for name in PLANNED:
            for vocab in FAMILIES[name].methods:
                without_rows = vocab == VocabMethod.NONE and costs_name in ("large vocabulary", "few holders")
                if without_rows or (vocab == VocabMethod.INTERLACED and costs_name not in ALIKE):
                    continue
                for ranks, microbatches in sizes:
                    yield Case(name, vocab.value, ranks, microbatches, costs_name)


def read_results() -> dict[Case, dict]:
    """Read the cases that were solved so far."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    found = {}
    for line in map(json.loads, lines):
        case = Case(line["schedule"], line["vocab"], line["ranks"], line["microbatches"], line["costs"])
        found[case] = line
    return found


def solve(case: Case, effort: float) -> dict:
    """Solve a case: find the makespan and memory of the shortest schedule, and the bound."""
    try:
        from exact_schedules import shortest
    except ModuleNotFoundError as error:
        sys.exit(f"--solve needs OR-tools, and there is no module {error.name}: pip install 'megatron_vp[optimality]'")
    family, costs, schedule = FAMILIES[case.name], case.costs(), case.schedule()
    if family.block is None:
        # For a family whose order is fixed, the limit is the memory that its order takes.
        limits, pairs = MemoryLimits(tuple(map(round, simulate(schedule).peak_activation))), ()
    else:
        request = case.request()
        limits, pairs = MemoryLimits(request.promised_peaks), request.nominal().pairs
    found = shortest(schedule, limits, pairs, costs, effort)
    return case.key | {
        "memory_limit": [limit / case.chunks for limit in limits.activations],
        "shortest": round(found.makespan, 6),
        "shortest_peak": list(simulate(found.schedule, costs).peak_activation),
        "bound": round(found.bound, 6),
        "proven": found.proven,
        "effort": effort,
    }


def ratio(case: Case, result: dict) -> float:
    """The ratio of our makespan to the bound."""
    return simulate(case.schedule(), case.costs()).makespan / result["bound"]


def most(case: Case) -> float:
    """The largest ratio of our makespan to the bound that is allowed for a case."""
    return EXCEPTED_ROWS.get((case.name, case.vocab, case.costs_name)) or EXCEPTED.get(case.name, MOST)


def table(results: dict[Case, dict]) -> str:
    """A Markdown table with the largest ratio for every family, method and set of costs."""
    rows = dict.fromkeys((case.name, case.vocab) for case in cases())
    lines = ["| schedule | vocabulary | " + " | ".join(SIZES) + " |", "|---" * (2 + len(SIZES)) + "|"]
    for name, vocab in rows:
        cells = []
        for costs_name in SIZES:
            mine = [case for case in results if (case.name, case.vocab, case.costs_name) == (name, vocab, costs_name)]
            worst = max(((ratio(case, results[case]), results[case]["proven"]) for case in mine), default=None)
            cells.append("" if worst is None else f"{worst[0]:.3f}" + ("" if worst[1] else " at most"))
        lines.append(f"| `{name}` | {vocab} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--solve", action="store_true", help="find the shortest schedules that the results lack")
    parser.add_argument("--effort", type=float, default=15.0, help="about so many seconds per case (default 15)")
    parser.add_argument("--only", nargs="+", choices=PLANNED, default=PLANNED, help="these families")
    args = parser.parse_args()
    results = read_results()

    failed = 0
    for case in cases():
        if case.name not in args.only:
            continue
        if case not in results and args.solve:
            results[case] = solve(case, args.effort)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(results[case]) + "\n")
        if case not in results:
            print(*case.key.values(), "not solved; give --solve", flush=True)
            failed = 1
            continue
        result, schedule = results[case], case.schedule()
        ours = simulate(schedule, case.costs())
        print(
            *case.key.values(),
            f"ours {ours.makespan:g} (peak {max(ours.peak_activation):g} of {max(result['memory_limit']):g}),",
            f"shortest {result['shortest']:g} (peak {max(result['shortest_peak']):g}),",
            f"{'proven' if result['proven'] else f'bound {result["bound"]:g}'}: {ratio(case, result):.4f}",
            flush=True,
        )
        if ratio(case, result) > most(case):
            failed = 1
    print(table(results), end="")
    return failed


if __name__ == "__main__":
    sys.exit(main())
