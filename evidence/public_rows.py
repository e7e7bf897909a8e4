"""Reads published runs from a file, and converts each into Megatron options and tokens/s per GPU.

`data/h100.csv` holds published throughputs with their configurations, and `data/models.csv` the sizes of the models.
Both files contain facts from public pages, with a source for each row. docs/evidence/public_runs.md describes the
columns.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evidence import DATA
from megatron_vp.errors import UserError
from megatron_vp.files import MIB, read_text

Columns = Mapping[str, str]

_MLP = {"swiglu": ["--swiglu"], "geglu": ["--quick-geglu"], "squared_relu": ["--squared-relu"], "gelu": []}
_SOFTWARE = {
    "sc21": ["--transformer-impl", "local"],  # The software is from 2021, before Transformer Engine.
    "nemo-longseq": ["--attention-backend", "flash"],  # The software is from early 2024, before FlashAttention 3.
}
"""For sources whose runs predate today's attention kernels: Megatron options that select the older kernels."""
_STATES = {
    # `optim.dtype` in nemotron4-340b-synth.yaml sets both moments to 16 bits. Megatron's nearest setting also keeps 2
    # bytes of each parameter's fp32 copy.
    "nemotron/README_340b.md at v25.02": ["--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"],
}
"""Options for runs whose optimizer states have lower precision than fp32. The options of a key apply to runs whose
`where` column contains the key.
"""
_FLEXIBLE = ("moe-zoo",)
"""Sources whose scripts dispatch tokens with DeepEP unless a run's note says otherwise."""
_MODULE = "recompute_"
"""Prefix of the values in the `options` column that name recomputed parts of a layer."""
_RECIPES = {"current": "tensorwise"}

_FREE_TEXT = ("where", "releases", "assumed", "note", "family", "fsdp", "not_in_flags")
"""Columns that a file of published runs may omit."""


@dataclass(frozen=True)
class PublicRow:
    """A published run: its row in the file, and the row of its model."""

    columns: Columns
    model: Columns

    def __getitem__(self, column: str) -> str:
        return self.columns[column]

    @property
    def group(self) -> str:
        """The group of runs to which this run belongs: dense_bf16, dense_fp8 or moe, with suffix _a100 for A100s."""
        return self["group"] + ("_a100" if self["gpu"] == "a100" else "")

    @property
    def judged(self) -> bool:
        """Whether everything that determines the run's time was published."""
        return self["judged"] == "yes"

    @property
    def gpus(self) -> int:
        """Number of GPUs in the run."""
        return int(self["gpus"])

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s per GPU, as published or derived from the step time or TFLOP/s."""
        if self["tokens_s_gpu"]:
            return float(self["tokens_s_gpu"])
        if self["step_s"]:
            return float(self["gbs"]) * float(self["seq"]) / float(self["step_s"]) / self.gpus
        return 1e12 * float(self["tflops_gpu"]) / self._flops_of_a_token

    @property
    def _flops_of_a_token(self) -> float:
        """FLOPs per token, counted as in the publication."""
        model = self.model
        layers, hidden, vocab = (
            float(each) for each in (self["layers"] or model["layers"], model["hidden"], model["vocab"])
        )
        length = float(self["seq"])
        if self["attention_counted"] == "full+recompute":  # Narayanan et al. 2021, section 5.1
            return 96 * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (16 * layers * hidden))
        channels = float(model["kv_channels"] or hidden / float(model["heads"]))
        queries, keys = channels * float(model["heads"]), channels * float(model["query_groups"])
        width = float(model["moe_ffn"]) * float(model["topk"]) if model["experts"] else float(model["ffn"])
        gated = 3 if model["mlp"] in ("swiglu", "geglu") else 2
        weights = hidden * (2 * queries + 2 * keys + gated * width)
        attention = 12 * layers * length * queries / (2 if self["attention_counted"] == "causal" else 1)
        return 6 * (layers * weights + vocab * hidden) + attention

    def flags(self) -> list[str]:
        """The Megatron options that describe the run."""
        return [*self._model_flags(), *self._run_flags(), *self._precision_flags()]

    def _model_flags(self) -> list[str]:
        model = self.model
        flags = [
            *("--num-layers", self["layers"] or model["layers"]),
            *("--hidden-size", model["hidden"]),
            *("--num-attention-heads", model["heads"]),
            *("--ffn-hidden-size", model["ffn"]),
            *("--vocab-size", model["vocab"]),
            *_MLP[model["mlp"]],
            *("--hidden-dropout", model["dropout"], "--attention-dropout", model["dropout"]),
        ]
        if model["query_groups"] != model["heads"]:
            flags += ["--group-query-attention", "--num-query-groups", model["query_groups"]]
        if model["kv_channels"]:
            flags += ["--kv-channels", model["kv_channels"]]
        if model["norm"] == "rms":
            flags += ["--normalization", "RMSNorm"]
        if model["position"] == "rope":
            flags += ["--position-embedding-type", "rope"]
        if model["tied"] == "0":
            flags.append("--untie-embeddings-and-output-weights")
        if model["qk_norm"] == "1":
            flags.append("--qk-layernorm")
        if model["experts"]:
            flags += ["--num-experts", model["experts"], "--moe-router-topk", model["topk"]]
            flags += ["--moe-ffn-hidden-size", model["moe_ffn"], "--moe-grouped-gemm"]
            named = {"flex_dispatcher", "hybrid_ep"} & {*self["options"].split(";")}
            by_default = self["source"] in _FLEXIBLE and "all-to-all" not in self.columns.get("note", "")
            flags += ["--moe-token-dispatcher-type", "flex" if named or by_default else "alltoall"]
            flags += ["--expert-model-parallel-size", self["ep"]]
            if self["etp"]:
                flags += ["--expert-tensor-parallel-size", self["etp"]]
        return flags + model["other_flags"].split()

    def _run_flags(self) -> list[str]:
        options = self["options"].split(";")
        flags = [
            *("--seq-length", self["seq"]),
            *("--micro-batch-size", self["mbs"], "--global-batch-size", self["gbs"]),
            *("--tensor-model-parallel-size", self["tp"], "--pipeline-model-parallel-size", self["pp"]),
            *("--context-parallel-size", self["cp"]),
        ]
        if self["layout"]:
            flags += ["--pipeline-model-parallel-layout", self["layout"]]
        elif int(self["vp"]) > 1:
            flags += ["--num-virtual-stages-per-pipeline-rank", self["vp"]]
        if int(self["tp"]) > 1:
            flags += ["--sequence-parallel"] * ("no_sequence_parallel" not in options)
            flags += ["--tp-comm-overlap"] * ("tp_overlap" in options)
        if "no_distributed_optimizer" not in options:
            flags.append("--use-distributed-optimizer")
        if "dp_overlap" in options:
            flags += ["--overlap-grad-reduce", "--overlap-param-gather"]
        if "ep_overlap" in options:
            flags.append("--overlap-moe-expert-parallel-comm")
        if self["recompute"] == "full":
            flags += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
        if "selective_recompute" in options:
            flags += ["--recompute-granularity", "selective"]
            modules = [each.removeprefix(_MODULE) for each in options if each.startswith(_MODULE)]
            flags += ["--recompute-modules", *modules] * bool(modules)
        if self["cross_entropy"] != "eager":
            flags += ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", self["cross_entropy"]]
        return flags + _SOFTWARE.get(self["source"], []) + self._states()

    def _states(self) -> list[str]:
        where = self.columns.get("where", "")
        states = next((found for text, found in _STATES.items() if text in where), None)
        return [] if states is None else ["--use-precision-aware-optimizer", *states]

    def _precision_flags(self) -> list[str]:
        options = self["options"].split(";")
        flags = ["--fp16" if self["precision"] == "fp16" else "--bf16"]
        if self["precision"] == "fp8":
            recipe = self["fp8_recipe"]
            flags += ["--fp8-format", "hybrid", "--fp8-recipe", _RECIPES.get(recipe, recipe)]
            flags += ["--fp8-param-gather"] * ("fp8_params" in options)
        return flags + ["--grad-reduce-in-bf16"] * ("bf16_gradients" in options)


def read_rows(runs: Path | None = None, models: Path | None = None) -> list[PublicRow]:
    """Read the published runs from `runs`, or from `data/h100.csv` if `runs` is None.

    Raises UserError for a file that cannot be read or lacks a column, and for a run whose model is not in the file
    `models`.
    """
    sizes, found = read_models(models), []
    for number, row in enumerate(_read(runs, "h100.csv"), 2):
        if row["model"] not in sizes:
            raise UserError(
                f"{runs or 'h100.csv'}, line {number}: the sizes of model {row['model']!r} are unknown; add the model "
                "to a copy of evidence/data/models.csv, and pass the copy as --models"
            )
        found.append(PublicRow(row, sizes[row["model"]]))
    return found


def read_models(path: Path | None = None) -> dict[str, Columns]:
    """Read the sizes of models, by name, from `path` or from `data/models.csv`. Raises UserError like `read_rows`."""
    return {model["model"]: model for model in _read(path, "models.csv")}


def _read(path: Path | None, own: str) -> list[dict[str, str]]:
    shipped = (DATA / own).read_text(encoding="utf-8")
    text = shipped if path is None else read_text(path, "published runs", MIB)
    rows = list(csv.DictReader(text.splitlines()))
    needed = _columns(shipped)
    missing = [column for column in needed if rows and rows[0].get(column) is None]
    if missing or not rows:
        lacks = f"column {missing[0]} is missing" if missing else "the file has no rows"
        raise UserError(
            f"{path or own}: {lacks}; the first line must name the columns {', '.join(needed[:4])} and so on, as in "
            f"evidence/data/{own}"
        )
    return rows


def _columns(shipped: str) -> list[str]:
    """The required columns: all columns of this folder's own file except those with free text."""
    return [column for column in next(csv.reader(shipped.splitlines())) if column not in _FREE_TEXT]
