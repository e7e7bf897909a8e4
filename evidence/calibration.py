"""Fits the constants to published values, and tests them on setups that the fit has not seen.

A cell is one run in the paper's tables. The fit minimises a weighted sum of squared errors: relative errors of the
cells' MFU and of pass times on 8 GPUs, and absolute errors of the output layer's scaling factors in Table 3. Each round
of the fit simulates every schedule only once, to find its critical path, and then computes iteration times from the
durations along these paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from statistics import fmean

import numpy as np

from evidence import DATA, figures
from megatron_vp.cost.hardware.constants import Constants
from megatron_vp.cost.layers.flops import paper_flops
from megatron_vp.cost.paper.published import Cell, Measurement, Row, jobs, read_cells
from megatron_vp.cost.paper.runs import A100, PEAK_FLOPS, machine, plan_of, predict_cell, simulator_of
from megatron_vp.cost.planning.predict import after_passes
from megatron_vp.cost.planning.stage_costs import stage_costs
from megatron_vp.cost.ranks.pass_times import PassTimes
from megatron_vp.schedule import Operation, Pass, StageCosts, VocabMethod
from megatron_vp.schedule.dependencies import Step

EXPECTED = Constants(
    matrix=0.82,
    attention_forward=0.3,
    attention_backward=0.4,
    newer_attention=2.0,
    bandwidth=0.82,
    layer_bytes=100.0,
    score_bytes=60.0,
    gap=0.15e-3,
    speed_spread=0.02,
    idle_boost=0.06,
    network=0.8,
)
"""Prior values for A100s and eager PyTorch code. `score_bytes` is 52 bytes per logit, as in an output layer that is not
split, plus 8 bytes for rescaling.
"""

SPREAD = Constants(
    matrix=0.05,
    attention_forward=0.15,
    attention_backward=0.15,
    newer_attention=0.15,
    bandwidth=0.05,
    layer_bytes=40.0,
    score_bytes=8.0,
    gap=0.1e-3,
    speed_spread=0.01,
    idle_boost=0.01,
    network=0.1,
)
"""Uncertainty of each prior value. If a constant deviates from its prior value by this much, the fit counts the
deviation like an error of 1 percent in the MFU of one cell.
"""

PASS_WEIGHT, FACTOR_WEIGHT = 0.5, 0.7
"""Weights of the errors in pass times and in Table 3's scaling factors. Errors in MFU have weight 1."""

WORST = 0.1
"""Weighted errors are clipped to plus or minus this value, so that a few large errors do not dominate the fit."""

ROUNDS = 3
"""Rounds of the fit. Each one simulates the schedules again, because other paths may have become critical."""

Residuals = Callable[[Constants], list[float]]

Part = tuple[int, ...]
"""Selects cells by the start of `Cell.setup`: (table, GPUs, sequence length), or (table, GPUs) for any length."""


@dataclass(frozen=True)
class PathTime:
    """Computes the MFU of one run of the paper for any constants, from a fixed chain of passes and operations."""

    cell: Cell
    path: tuple[Step | Operation, ...]

    @classmethod
    def of(cls, cell: Cell, constants: Constants) -> PathTime:
        """Find the critical path of `cell` under `constants`."""
        simulator = simulator_of(cell)
        graph, start, end, order = simulator.simulate(_costs(cell, constants)).nodes
        last: dict[int, int] = {}
        before = list(map(list, graph.predecessors))
        for number in order:  # A node also waits for its turn on its lane.
            before[number] += [last[graph.lanes[number]]] if graph.lanes[number] in last else []
            last[graph.lanes[number]] = number
        path = [max(range(len(end)), key=end.__getitem__)]
        while before[path[-1]] and start[path[-1]] > 0:
            path.append(max(before[path[-1]], key=end.__getitem__))
        return cls(cell, tuple(graph.nodes[number] for number in reversed(path)))

    def mfu(self, constants: Constants) -> float:
        """MFU in percent."""
        costs, schedule = _costs(self.cell, constants), simulator_of(self.cell).schedule

        def duration(node: Step | Operation) -> float:
            if not isinstance(node, Step):
                return costs.communication(schedule, node)
            return costs.duration(schedule, node.rank, node.action) if isinstance(node.action, Pass) else 0.0

        took = sum(map(duration, self.path))
        job = jobs()[self.cell]
        took += after_passes(job, plan_of(self.cell), schedule, machine(self.cell.table, constants))
        return 100 * paper_flops(job) / job.gpus / took / PEAK_FLOPS[self.cell.table]


def _costs(cell: Cell, constants: Constants) -> StageCosts:
    schedule = simulator_of(cell).schedule
    return stage_costs(jobs()[cell], plan_of(cell), schedule, machine(cell.table, constants))


def pass_times() -> list[dict[str, float]]:
    """Mean pass times in milliseconds and iteration times in seconds, measured by the authors on 8 A100s."""
    return [{name: float(value) for name, value in row.items()} for row in figures("pass_times_8gpu_a100.csv")]


def known_cells() -> dict[Cell, Measurement]:
    """The published cells of the paper's tables to which constants may be fitted."""
    return read_cells(DATA / "published_mfu.csv")


def layout_unknown(cell: Cell) -> bool:
    """Whether the layout of `cell` is unknown: the paper publishes the layouts of `redis` only for 8 GPUs."""
    return cell.method == "redis" and cell.gpus > 8


def other_layout_rows(rows: Iterable[Row], worse_than: float = 5.0) -> dict[Row, int]:
    """Rows of the `redis` cells whose layer layout is unknown, each with the number of layers on the last stage that
    gives the smallest MFU error: the assumed one, one more or one fewer.

    Cells whose MFU error in `rows` is at most `worse_than` percent are left out.
    """
    found = {}
    for row in rows:
        if not layout_unknown(row.cell) or abs(row.error("mfu") or 0) <= worse_than:
            continue
        plan = plan_of(row.cell)
        assert plan.layers is not None
        tried = {row: plan.layers[-1]}
        for last in {max(0, plan.layers[-1] - 1), plan.layers[-1] + 1} - {plan.layers[-1]}:
            others = len(plan.layers) - 1
            each, larger = divmod(sum(plan.layers) - last, others)
            layers = (*(each + (stage >= others - larger) for stage in range(others)), last)
            tried[replace(predict_cell(row.cell, plan=replace(plan, layers=layers)), published=row.published)] = last
        best = min(tried, key=lambda each: abs(each.error("mfu") or 0))
        found[best] = tried[best]
    return found


def scaling_factors() -> dict[tuple[int, str, int], float]:
    """Table 3's percentages of linear scaling, keyed by sequence length, layer (such as `output-vocab-1`) and GPUs."""
    return {
        (int(row["seq_length"]), row["layer"], int(row["gpus"])): float(row["percent_of_linear"])
        for row in figures("table3_scaling.csv")
    }


def scaling_factor(cell: Cell, method: VocabMethod, constants: Constants) -> float:
    """A factor of Table 3 in percent: the unsplit output layer's time, divided by p times the time of S and T."""
    times = PassTimes(jobs()[cell], replace(A100, constants=constants))
    return 100 * sum(times.whole_output()) / cell.gpus / sum(times.output_shard(method))


def pass_errors(constants: Constants) -> dict[str, list[float]]:
    """Relative errors of predicted pass times on 8 GPUs, by column of the published file."""
    found: dict[str, list[float]] = {}
    for row in pass_times():
        job = jobs()[Cell(5, 8, int(row["seq_length"]), "baseline", int(row["vocab_k"]))]
        times = PassTimes(job, replace(A100, constants=constants))
        layers, layer, output = job.model.layers // 8, times.layer(), times.whole_output()
        forward = layers * layer.F + constants.gap
        backward = layers * (layer.B + layer.W) + constants.gap
        idle = 1 - constants.idle_boost
        predicted = {
            "base_f_ms": forward * idle,
            "base_b_ms": backward * idle,
            "base_last_f_ms": forward + output.F,
            "base_last_b_ms": backward + output.B + output.W,
            "vocab2_f_ms": forward,
            "vocab2_b_ms": backward,
            "vocab2_st_ms": sum(times.output_shard(VocabMethod.VOCAB_2)),
            "vocab1_st_ms": sum(times.output_shard(VocabMethod.VOCAB_1)),
        }
        for name, seconds in predicted.items():
            found.setdefault(name, []).append(1e3 * seconds / row[name] - 1)
    return found


def factor_errors(constants: Constants) -> list[float]:
    """Predicted minus published scaling factors of the output layer in Table 3, as fractions instead of percentages."""
    return [
        (scaling_factor(Cell(5, gpus, sequence, "baseline", 256), VocabMethod(layer[7:]), constants) - published) / 100
        for (sequence, layer, gpus), published in scaling_factors().items()
        if layer.startswith("output-")
    ]


def fit(cells: Mapping[Cell, Measurement]) -> Constants:
    """Fit the constants to the MFU of `cells`, to the published pass times, and to Table 3's scaling factors."""
    measured = {cell: entry.mfu for cell, entry in cells.items() if entry.mfu is not None}
    found = EXPECTED
    for _ in range(ROUNDS):
        paths = [PathTime.of(cell, found) for cell in measured]
        found = _least_squares(partial(_residuals, paths=paths, measured=measured), found)
    return found


def _residuals(constants: Constants, paths: Iterable[PathTime], measured: Mapping[Cell, float]) -> list[float]:
    errors = [path.mfu(constants) / measured[path.cell] - 1 for path in paths]
    errors += [PASS_WEIGHT * error for column in pass_errors(constants).values() for error in column]
    errors += [FACTOR_WEIGHT * error for error in factor_errors(constants)]
    errors = [max(-WORST, min(WORST, error)) for error in errors]
    expected = zip(astuple(constants), astuple(EXPECTED), astuple(SPREAD), strict=True)
    return errors + [0.01 * (value - usual) / spread for value, usual, spread in expected]


def _least_squares(residuals: Residuals, start: Constants, steps: int = 4) -> Constants:
    """Minimise the squared residuals in at most `steps` Gauss-Newton steps with numerical derivatives. The first step
    that brings no improvement ends the search.
    """
    found, now = start, np.array(residuals(start))
    for _ in range(steps):
        values = astuple(found)
        moved = (replace(found, **{each.name: 1.001 * getattr(found, each.name)}) for each in fields(Constants))
        slopes = np.column_stack([(np.array(residuals(each)) - now) / 1e-3 for each in moved])
        changes = np.linalg.lstsq(slopes, -now)[0].clip(-0.4, 0.4)
        tried = Constants(*(value * (1 + float(change)) for value, change in zip(values, changes, strict=True)))
        then = np.array(residuals(tried))
        if then @ then >= now @ now:
            break
        found, now = tried, then
    return found


@dataclass(frozen=True)
class LeftOut:
    """Prediction errors for the cells that a fit left out: mean and maximum of the absolute values, in percent."""

    part: Part
    cells: int
    mfu: tuple[float, float]
    memory: tuple[float, float]


def leave_out(
    cells: Mapping[Cell, Measurement], parts: Iterable[Part], progress: Callable[[], None] = lambda: None
) -> list[LeftOut]:
    """For each of the `parts`, predict its cells with constants that are fitted to all other cells.

    Pass times and Table 3 are always part of the fit. The returned errors exclude cells whose distribution of layers
    over stages is unknown.
    """
    found = []
    for part in parts:
        unseen = {cell for cell in cells if cell.setup[: len(part)] == part}
        constants = fit({cell: entry for cell, entry in cells.items() if cell not in unseen})
        mfu, memory = [], []
        for cell, entry in cells.items():
            if cell in unseen and entry.mfu is not None and entry.memory is not None and not layout_unknown(cell):
                predicted = predict_cell(cell, constants)
                mfu.append(100 * abs(predicted.mfu / entry.mfu - 1))
                memory.append(100 * abs(predicted.memory / entry.memory - 1))
        found.append(LeftOut(part, len(mfu), (fmean(mfu), max(mfu)), (fmean(memory), max(memory))))
        progress()
    return found


def report(constants: Constants) -> list[str]:
    """Format the constants, and their errors in predicting pass times and Table 3."""
    lines = [f"{field.name} = {getattr(constants, field.name):.4g}" for field in fields(constants)]
    lines += ["", "pass times on 8 GPUs: mean and largest error in percent"]
    for name, errors in pass_errors(constants).items():
        sizes = [100 * abs(error) for error in errors]
        lines.append(f"  {name:15} {fmean(sizes):5.2f} {max(sizes):5.2f}")
    sizes = [100 * abs(error) for error in factor_errors(constants)]
    of_table = f"table 3, output layer: mean error {fmean(sizes):.2f}, largest error {max(sizes):.2f} percentage points"
    return [*lines, of_table]


def known_to_fit() -> dict[Cell, Measurement]:
    """Measurements of the paper's runs, except runs whose distribution of layers over stages is unknown."""
    return {cell: entry for cell, entry in known_cells().items() if not layout_unknown(cell)}
