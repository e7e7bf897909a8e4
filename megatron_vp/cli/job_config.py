"""A job for the cost model from the configuration that trains it: Megatron's arguments, read without Megatron."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_vp.errors import UserError
from megatron_vp.schedule import DEFAULT_SCHEDULE, family, megatrons_own

if TYPE_CHECKING:
    from megatron_vp.cost.shapes import Job, Plan

SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "num_query_groups",
    "vocab_size",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
)
SWITCHES = (
    "vocab_parallel",
    "sequence_parallel",
    "use_distributed_optimizer",
    "untie_embeddings_and_output_weights",
    "first_last_layers_bf16",
    "cross_entropy_loss_fusion",
)
OTHERS = (
    *SWITCHES,
    "vocab_parallel_algorithm",
    "pipeline_schedule",
    "pipeline_model_parallel_layout",
    "recompute_granularity",
    "fp8_format",
    "fp8_recipe",
    "cross_entropy_fusion_impl",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
)
UNCOUNTED = (
    "mtp_num_layers",
    "hybrid_layer_pattern",
    "multi_latent_attention",
    "experimental_attention_variant",
    "window_size",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "expert_tensor_parallel_size",
    "fp4_format",
    "fp8_param_gather",
    "fp8_output_proj",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "no_fp8_wgrad",
    "disable_fp8_wgrad",
    "te_precision_config_file",
    "recompute_modules",
    "cpu_offloading_num_layers",
    "fine_grained_activation_offloading",
    "optimizer_cpu_offload",
    "rampup_batch_size",
    "step_batch_size_schedule",
)
"""What changes time or memory and is unknown to the cost model."""
LARGEST_SIZE = 10**9
LARGEST = {
    "hidden_size": 2**20,
    "num_attention_heads": 2**16,
    "ffn_hidden_size": 2**22,
    "kv_channels": 2**16,
    "vocab_size": 2**28,
    "padded_vocab_size": 2**28,
    "num_experts": 2**16,
    "moe_ffn_hidden_size": 2**22,
    "seq_length": 2**26,
    "micro_batch_size": 2**20,
}
"""Sizes beyond which no model is trained: a larger one is a slip of the keyboard. LARGEST_SIZE for all others."""
_LONGEST_LAYOUT = 10_000


@dataclass(frozen=True)
class JobConfig:
    """Arguments by long name, with underscores: those of the files, then the flags. SIZES are whole numbers or None."""

    values: dict[str, Any]

    def job(self, gpus: int | None) -> Job:
        """The job on `gpus` GPUs; None: one replica. Raises UserError where sizes do not fit each other."""
        from megatron_vp.cost.arguments import job_of

        return job_of(self.values, gpus)

    def uncounted(self) -> list[str]:
        """Flags of this job that the cost model knows nothing of, though they change time or memory."""
        return [flag(name) for name in UNCOUNTED if self.values.get(name) not in (None, False)]

    def plan(self) -> Plan:
        """How the configuration itself runs its pipeline. Raises UserError."""
        from megatron_vp.cost.shapes import Plan
        from megatron_vp.schedule import VocabMethod

        asked = self.values.get("pipeline_schedule")
        chosen = family(DEFAULT_SCHEDULE if asked is None else str(asked))
        vocab, chunks = VocabMethod.NONE, self._chunks()
        split = self.values.get("vocab_parallel") is True
        if chosen.name == DEFAULT_SCHEDULE and not split:
            chosen = megatrons_own(chunks)
        if chosen.own_method is not None:
            if not split:
                raise UserError(
                    f"--pipeline-schedule {chosen.name} is a way to split the vocabulary: add --vocab-parallel"
                )
            vocab = chosen.own_method
        elif split:
            algorithm = self.values.get("vocab_parallel_algorithm") or VocabMethod.VOCAB_2
            if algorithm not in (VocabMethod.VOCAB_1, VocabMethod.VOCAB_2):
                raise UserError(f"--vocab-parallel-algorithm {algorithm!r} is unknown; use vocab-1 or vocab-2")
            vocab = VocabMethod(algorithm)
        layout = self.values.get("pipeline_model_parallel_layout")
        return Plan(chosen.name, vocab, chunks, None if layout is None else layers_in(str(layout)))

    def settings_of(self, plan: Plan, job: Job) -> dict[str, Any]:
        """What to change for this configuration to run `plan`, by long name; None and False unset what it sets."""
        from megatron_vp.cost.layouts import equal_layers
        from megatron_vp.schedule import VocabMethod

        layout = self.values.get("pipeline_model_parallel_layout")
        layers, chunks = plan.layers, plan.chunks
        if layers is None and layout is not None:
            layers = equal_layers(job, job.pipeline * (chunks or family(plan.schedule).chunks or 1))
        if layers is not None and (layout is None or layers_in(str(layout)) != layers):
            layout = layout_of(layers)
        split = plan.vocab is not VocabMethod.NONE
        # Without vocabulary passes, several chunks are all that makes Megatron's own schedule interleaved.
        own = not split and plan.schedule == megatrons_own(chunks).name
        wanted = {
            "vocab_parallel": split,
            "vocab_parallel_algorithm": plan.vocab.value if plan.vocab.is_sharded else None,
            "pipeline_schedule": DEFAULT_SCHEDULE if own else plan.schedule,
            "pipeline_model_parallel_layout": layout,
            "num_virtual_stages_per_pipeline_rank": chunks if layout is None else None,
            "num_layers_per_virtual_pipeline_stage": None,
        }
        defaults = {"vocab_parallel": False, "pipeline_schedule": DEFAULT_SCHEDULE}
        settings = {name: value for name, value in wanted.items() if value != self.values.get(name, defaults.get(name))}
        if plan.vocab.is_sharded:  # the default, but what was chosen should be seen
            settings.setdefault("vocab_parallel_algorithm", plan.vocab.value)
        return settings

    def _chunks(self) -> int | None:
        chunks = self.values.get("num_virtual_stages_per_pipeline_rank")
        each = self.values.get("num_layers_per_virtual_pipeline_stage")
        if chunks is None and each is not None:
            job = self.job(None)
            stages, rest = divmod(job.model.layers, each)
            chunks, uneven = divmod(stages, job.pipeline)
            if rest or uneven:
                raise UserError(f"--num-layers-per-virtual-pipeline-stage {each} does not divide the layers of a rank")
        layout = self.values.get("pipeline_model_parallel_layout")
        own = family(self.values.get("pipeline_schedule") or DEFAULT_SCHEDULE).chunks or 1
        if chunks is None and layout is not None and own == 1:
            # As Megatron does; a number of stages that does not go with the ranks is refused with the layers.
            chunks = max(1, len(layers_in(str(layout))) // (self.values.get("pipeline_model_parallel_size") or 1))
        return None if chunks == 1 else chunks


def read_job_config(paths: Sequence[Path], flags: Sequence[str]) -> JobConfig:
    """Overlaid files, then flags (`--name value`, `--name=value`, `--switch`); later ones win.

    Arguments that do not affect sizes are ignored. Raises UserError for a file that cannot be read, a word that is
    not a flag, a key or a flag that looks like a misspelt size, a size that no job has, NaN and infinity, and a section
    that is a list.
    """
    from megatron_vp.mcore.options.config_file import read_leaves

    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    for leaf in read_leaves(paths):
        _refuse_misspelt(leaf.key, str(leaf))
        if leaf.key in given:
            raise UserError(f"{leaf} was already set elsewhere ({given[leaf.key]}); keep one of them")
        values[leaf.key], given[leaf.key] = leaf.value, str(leaf)
    name = None
    for word in flags:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            given[name] = flag(name)
            _refuse_misspelt(name, flag(name))
            values[name] = _value(text) if equals else True
        elif name is None:
            raise UserError(f"{word!r} is no flag; after the configuration come --flags")
        else:
            values[name] = _value(word)
    for name in SIZES:
        value = values.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            found = "without a value" if value is True and given[name] == flag(name) else repr(value)
            raise UserError(f"{given[name]} {found} is no whole number of at least 1")
        largest = LARGEST.get(name, LARGEST_SIZE)
        if value is not None and value > largest:
            raise UserError(f"{given[name]} {value} is too large for any job; give at most {largest}")
    for name, value in values.items():
        _refuse_unusable(value, given[name])
    for name in SWITCHES:
        if values.get(name) not in (None, False, True):
            raise UserError(f"{given[name]} is a switch and takes no value; it was given {values[name]!r}")
    return JobConfig(values)


def _refuse_unusable(value: Any, given: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{given} {value} is not a finite number")


def _refuse_misspelt(name: str, given: str) -> None:
    near = difflib.get_close_matches(name, (*SIZES, *OTHERS), 1, 0.92)
    if near and near[0] != name:
        raise UserError(f"{given} is no argument that sizes a job; the nearest is {flag(near[0])}")


def layers_in(layout: str) -> tuple[int, ...]:
    """Transformer layers by stage of `--pipeline-model-parallel-layout`, such as `Et*5|(t*5|)*6t*3L`.

    Raises UserError for anything else.
    """
    text = layout.replace(" ", "").replace(",", "")
    while repeated := re.search(r"(?:\(([^()]*)\)|([EtmL]))\*(\d{1,9})", text):
        part, times = repeated[1] or repeated[2] or "", int(repeated[3])
        if len(text) + len(part) * times > _LONGEST_LAYOUT:
            raise UserError(
                f"--pipeline-model-parallel-layout {layout!r} stands for more than {_LONGEST_LAYOUT} letters"
            )
        text = text[: repeated.start()] + part * times + text[repeated.end() :]
    if not re.fullmatch(r"E?[t|]*m*L?", text):
        raise UserError(f"--pipeline-model-parallel-layout {layout!r} is not understood; write it as Et*4|(t*5|)*6t*3L")
    return tuple(segment.count("t") for segment in text.split("|"))


def layout_of(layers: Sequence[int]) -> str:
    """The layout string of these transformer layers by stage."""
    return "E" + "|".join(f"t*{count}" if count else "" for count in layers) + "L"


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def flag(name: str) -> str:
    """An argument's name as a flag."""
    return f"--{name.replace('_', '-')}"
