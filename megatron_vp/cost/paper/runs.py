"""Predicts the paper's runs as the authors ran them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from megatron_vp.cost.hardware.constants import FITTED, Constants
from megatron_vp.cost.hardware.gpus import HARDWARE, Hardware
from megatron_vp.cost.layers.flops import paper_flops
from megatron_vp.cost.layers.layouts import redistributed_layers
from megatron_vp.cost.layers.shapes import Plan
from megatron_vp.cost.paper.published import Cell, Row, jobs
from megatron_vp.cost.planning.predict import Prediction, make_simulator, predict
from megatron_vp.cost.ranks.rank_memory import GIB
from megatron_vp.schedule import PassCosts, Simulator, VocabMethod, family, generate

A100 = replace(HARDWARE["a100"], rates=None)
"""The A100 without `rates`, so that the cost model uses the constants that were fitted to the authors' kernels."""

PEAK_FLOPS = {5: 320e12, 6: 312e12}
"""Peak FLOP/s in the definition of each table's MFU. For table 5, 320 TFLOP/s reproduces the MFU of all runs on 8 GPUs.
For table 6, the nominal 312 TFLOP/s of the authors' scripts is assumed, because it implies the same time for the output
layer as in table 5.
"""

NOMINAL_CELL = {"vocab_k": 64, "sequence": 2048}
"""The vocabulary size (in thousands) and the sequence length whose costs determine the pass order of all cells with the
same model and method. This order is at most 0.3 percent slower than one computed from the cell's own costs.
"""


EQUAL = PassCosts(F=1, B=1, W=1)
"""Equal costs, as in the published building block of V-Half. They determine the pass order of V-Half without vocabulary
parallelism. The real costs include an output layer that is not split; if they determined the order, W would be delayed
while rank 0 holds the most activations, and memory would be up to 16 percent higher than published.
"""


def plan_of(cell: Cell) -> Plan:
    """The plan of a cell's run: schedule, vocabulary method and number of layers per stage."""
    schedule = "v-half" if cell.table == 6 else "1f1b"
    match cell.method:
        case "redis":
            return Plan(schedule, layers=redistributed_layers(jobs()[cell]))
        case "interlaced":
            return Plan("interlaced", VocabMethod.INTERLACED)
        case "baseline":
            return Plan(schedule)
    return Plan(schedule, VocabMethod(cell.method))


def machine(table: int, constants: Constants = FITTED) -> Hardware:
    """The A100 with `constants`, adapted to the code base that a table was measured with."""
    return replace(A100, constants=constants.with_newer_attention() if table == 6 else constants)


def simulator_of(cell: Cell) -> Simulator:
    """The simulator of `cell`'s pass order. All cells with the same model and method share this simulator."""
    plan = plan_of(cell)
    return _simulator(cell._replace(method="baseline", **NOMINAL_CELL), plan.schedule, plan.vocab)


@cache
def _simulator(cell: Cell, schedule: str, vocab: VocabMethod) -> Simulator:
    job = jobs()[cell]
    if vocab is VocabMethod.NONE and not family(schedule).in_megatron:
        # The authors' baseline uses the published order, which does not depend on costs.
        made = generate(schedule, job.pipeline, job.microbatches, costs=EQUAL)
        return Simulator(made, EQUAL)
    # `further_orders` was also False when the constants were fitted.
    return make_simulator(job, Plan(schedule, vocab), A100, further_orders=False)


def predict_cell(cell: Cell, constants: Constants = FITTED, plan: Plan | None = None) -> Row:
    """Predict `cell`, with `plan` instead of its own plan if it is given."""
    plan = plan or plan_of(cell)
    found = predict(jobs()[cell], plan, machine(cell.table, constants), simulator=simulator_of(cell))
    return Row(cell, paper_mfu(found, PEAK_FLOPS[cell.table]), found.allocated / GIB, found.fits())


def paper_mfu(found: Prediction, peak_flops: float) -> float:
    """MFU in percent of `peak_flops`. As in the paper, the causal mask does not halve attention's FLOPs."""
    return 100 * paper_flops(found.job) / found.job.gpus / found.iteration_seconds / peak_flops
