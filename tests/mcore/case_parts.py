"""Megatron's options by name, and the matrices of jobs that combine them (`matrix.toml`).

`scripts/compatibility.py` generates the tables of the compatibility page from these matrices.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

BASIC = ("1f1b/vocab-2",)
EVERY_SHAPE = ("1f1b/vocab-2", "interleaved/vocab-1", "v-half/vocab-2")
WHOLE_LAYERS = ("zb-h1/none", "v-half/none", "interleaved/none")
SURVEY_WAYS = ("1f1b/vocab-2", "v-half/vocab-1", "zb-h1/none", "interleaved/vocab-2")
MANY_WAYS = (*SURVEY_WAYS, "zb-h1/vocab-2", "v-half/none", "interleaved/none")
FEWER_CHUNKS = ("1f1b/vocab-2", "v-half/vocab-1", "zb-h1/none")
TWO_WAYS = ("1f1b/vocab-2", "v-half/vocab-1")
"""For what happens outside of the schedule."""
FP32, SURVEY_BOUND = 1e-6, 2e-5


@dataclass(frozen=True)
class Job:
    """Options of Megatron's, and how runs with them are compared with plain Megatron on the same ranks.

    name: what the job is about, the row's title on the page.
    options: long argument names with underscores; in the option survey, `{data}` stands for a folder with datasets,
        `{folder}` for a folder of the run's own.
    ways: `schedule/algorithm`, `none` without --vocab-parallel.
    ranks, size: processes, and p of them in a pipeline.
    default: the way that runs by default; all others run with `-m slow`.
    bound: largest relative distance of a number in fp32. Combinations in half precision are compared with the rounding
        that plain Megatron itself shows against fp32.
    ours, plain: further options of our runs, and of plain Megatron's.
    why: in the option survey, the reason for other ways or another bound than those of most jobs.
    but: beginnings of the names of logged numbers that are not compared, for the reason that `why` gives.
    by_name: all weights are set by their names, as in jobs of two runs. Otherwise they are Megatron's own, and ways
        with several chunks per rank start from plain Megatron's checkpoint of iteration 2.
    then: options of a second run, which loads what the first one saved to `{folder}/saved`.
    """

    name: str
    options: Mapping[str, object] = field(default_factory=dict)
    ways: tuple[str, ...] = BASIC
    ranks: int = 2
    size: int = 2
    default: str = ""
    bound: float = FP32
    ours: Mapping[str, object] = field(default_factory=dict)
    plain: Mapping[str, object] = field(default_factory=dict)
    why: str = ""
    but: tuple[str, ...] = ()
    by_name: bool = False
    then: Mapping[str, object] | None = None

    @property
    def replicas(self) -> int:
        """Data-parallel size."""
        parts = (int(self.options.get(f"{kind}_parallel_size", 1)) for kind in ("tensor_model", "context"))
        return self.ranks // math.prod(parts, start=self.size)

    @property
    def precision(self) -> str | None:
        """`bf16`, `fp16`, or None for fp32."""
        return next((name for name in ("bf16", "fp16") if self.options.get(name)), None)


@dataclass(frozen=True)
class Move:
    """A model's moves from one layout to each of several others, and back.

    name: the row's title on the page.
    start: the layout that trains first and last, as `Layout.read` of `test_checkpoints.py` takes it.
    others: the layouts between.
    options: what all runs have in common, as long argument names with underscores.
    default: the move to the first of the others runs by default; all others run with `-m slow`.
    carried: no step is trained in the other layout, and training goes on bit for bit. Else two steps are, and every
        loss and gradient norm is within 1e-6 of those of a run that was never moved.
    """

    name: str
    start: str
    others: tuple[str, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    default: bool = False
    carried: bool = False


def chunks(way: str) -> int:
    """Model chunks per rank."""
    return 2 if way.split("/")[0] in ("interleaved", "v-half", "v-min", "zb-v", "dualpipe-v") else 1


def way_options(way: str, size: int | None = None, **options: object) -> dict[str, object]:
    """What is added to a job's options to run it in this way, on `size` stages if they do not say on how many."""
    schedule, algorithm = way.rsplit("/", 1)
    sized = {} if size is None else {"pipeline_model_parallel_size": size}
    laid_out = options.keys() & {"pipeline_model_parallel_layout", "hybrid_layer_pattern"}
    return {
        **sized,
        "pipeline_schedule": schedule,
        "vocab_parallel": algorithm != "none",
        "vocab_parallel_algorithm": None if algorithm == "none" else algorithm,
        "num_virtual_stages_per_pipeline_rank": 2 if schedule == "interleaved" and not laid_out else None,
    }


TIED = {"untie_embeddings_and_output_weights": False}
OVERLAPPED = {"overlap_grad_reduce": True}
DISTRIBUTED = {"use_distributed_optimizer": True}
BOTH = {**OVERLAPPED, **DISTRIBUTED, "overlap_param_gather": True}
LLAMA = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
MUP = {"use_mup": True, "mup_base_hidden_size": 32, "mup_output_mult": 0.3, "mup_embedding_mult": 2.0}
AHEAD = {"mtp_num_layers": 2, "position_embedding_type": "rope"}
HYBRID = {
    "num_layers": None,
    "hybrid_layer_pattern": "*-|*-",
    "spec": ["megatron_vp.mcore.hybrid_stack", "local_stack_spec"],
    "position_embedding_type": "rope",
}
MOE = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "disable_bias_linear": True,
}
OVERFLOW = {"train_iters": 4, "fp16": True, "initial_loss_scale": 2**21, "hysteresis": 1}
EXPERT = {**MOE, "expert_model_parallel_size": 2}
ALL_TO_ALL = {**EXPERT, "moe_token_dispatcher_type": "alltoall"}
OVERLAPPED_EXPERT = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True}
SIGMOID_ROUTER = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
PAIRS = {"overlap_moe_expert_parallel_comm": True}
CONTEXT = {"context_parallel_size": 2, "core_attention": "sdpa", "position_embedding_type": "rope"}
LATENT = {
    **{"multi_latent_attention": True, "core_attention": "sdpa", "position_embedding_type": "rope"},
    **{"normalization": "RMSNorm", "qk_layernorm": True, "q_lora_rank": 32, "kv_lora_rank": 16},
    **{"qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12},
}
DEEPSEEK = {
    **LATENT,
    **ALL_TO_ALL,
    **SIGMOID_ROUTER,
    "expert_model_parallel_size": 1,
    "swiglu": True,
    "moe_layer_freq": "([0]+[1]*3)",
    "moe_shared_expert_intermediate_size": 64,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_dtype": "fp32",
}
"""DeepSeek-V3's layers: one dense, then experts beside a shared one."""
ROPE = {"position_embedding_type": "rope"}
GROUPS = {"decoupled_lr": 1e-4, "weight_decay": 10}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
GROWING = {
    "step_batch_size_schedule": "0:4 1024:8 2560:12",  # from so many tokens on
    "global_batch_size": None,
    "train_iters": 8,
    "eval_global_batch_size": 5,
    "eval_micro_batch_size": 1,
}
SGD = {
    "optimizer": "sgd",
    "clip_grad": 0,
    "weight_decay_incr_style": "linear",
    "start_weight_decay": 0.0,
    "end_weight_decay": 10.0,
}
MUON = {"optimizer": "muon", "muon_fp32_matmul_prec": "high"}
"""In the exactest precision that Megatron offers: the others round its products as bf16 does."""
DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
LOCAL_FP32 = {"grad_reduce_in_bf16": True, "ddp_param_name_patterns_for_fp32_local_accumulation": ["all"]}
RESHARDABLE = {**DISTRIBUTED, "dist_ckpt_optim_fully_reshardable": True}
ASYNCHRONOUS = {"async_save": True, "async_strategy": "mcore", "use_persistent_ckpt_worker": True}
LONG_HYBRID = {**HYBRID, "hybrid_layer_pattern": "*-*-*-*-"}
MUP_SMALL = {"use_mup": True, "mup_base_hidden_size": 16, "mup_base_head_dim": 4, "mup_attn_scale_power": 0.5}
MUP_SMALL |= {"mup_embedding_mult": 2.0, "mup_output_mult": 0.3}
DATA = {"mock_data": None, "data_cache_path": "{folder}/cache", "null_tokenizer_eod_id": 499}
ONE_FILE = {**DATA, "data_path": ["{data}/a"], "split": "80,10,10"}
FALLING = {"lr_decay_style": "linear", "lr_decay_iters": 10, "min_lr": 1e-4}
BY_SAMPLES = {"train_iters": None, "train_samples": 40}
OVERRIDDEN = {"train_iters": 8, "override_opt_param_scheduler": True}
"""Of a second run that goes on."""


def _block(attention: str, mlp: str) -> dict[str, object]:
    """A layer of a heterogeneous model; each part is `whole`, `linear` or `none`."""
    parts = {
        "attention": {"n_heads_in_group": 2 if attention == "whole" else None},
        "ffn": {"ffn_mult": 2.0 if mlp == "whole" else None},
    }
    for part, kind in zip(parts.values(), (attention, mlp), strict=True):
        part |= {"no_op": kind == "none", "replace_with_linear": kind == "linear"}
    return parts


_BLOCKS = {
    **{"hidden_act": "silu", "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4},
    **{"tie_word_embeddings": False, "rope_theta": 10000, "rope_scaling": {"factor": 8.0}},
    "block_configs": [
        _block(*kinds) for kinds in (("whole", "whole"), ("none", "whole"), ("linear", "linear"), ("whole", "none"))
    ],
}
HETEROGENEOUS = {
    **LLAMA,
    "heterogeneous_layers_config_encoded_json": json.dumps(_BLOCKS),
    "num_layers": 4,
    "use_rotary_position_embeddings": True,
    "use_rope_scaling": True,
    "untie_embeddings_and_output_weights": True,
}


def _named(words: str) -> dict[str, object]:
    return {name: value for part in words.split() for name, value in globals()[part].items()}


def _ways(words: str) -> tuple[str, ...]:
    return tuple(way for word in words.split() for way in globals().get(word, (word,)))


def _least_met(ways: Iterable[str], given: Iterable[str], met: Counter[object]) -> str:
    """The way that has met fewest of what is given, and the rarest of those: so each way meets each part in its turn.

    `met` counts ways and their meetings in one table.
    """
    way = min(ways, key=lambda way: (sum((way, each) in met for each in given), met[way]))
    met.update([way, *((way, each) for each in given)])
    return way


def _job(row: dict[str, object], met: Counter[object], **defaults: object) -> Job:
    """A row's job, in one of its ways: its default, or the one that has met fewest of the row's parts and options."""
    asked = [*row.get("parts", "").split(), *row.get("options", ())]
    options = {name: row.pop(name, None) for name in ("options", "then", "plain", "ours")}
    for name, given in options.items():
        parts = row.pop("parts" if name == "options" else f"{name}_parts", "")
        if parts or given is not None:
            row[name] = _named(parts) | (given or {})
    ways = [row["default"]] if "default" in row else _ways(row.get("ways", "")) or defaults.get("ways", BASIC)
    row["ways"] = (_least_met(ways, asked, met),)
    row["but"] = tuple(filter(None, row.pop("but", "").split(",")))
    return Job(**defaults | row)


_TABLES = tomllib.loads((Path(__file__).parent / "matrix.toml").read_text())
_MET, _SURVEYED = Counter(), Counter()
COMBINATIONS = tuple(_job(row, _MET) for row in _TABLES["combinations"])
SURVEY = {
    each["subject"]: tuple(_job(row, _SURVEYED, ways=SURVEY_WAYS, bound=SURVEY_BOUND) for row in each["jobs"])
    for each in _TABLES["survey"]
}
"""The option survey's jobs, by what they are about."""
MOVES = tuple(
    Move(**row | {"others": others, "options": _named(row.pop("parts", "")) | row.get("options", {})})
    for turn, row in enumerate(_TABLES["moves"])
    for others in [row["others"][turn % min(8, len(row["others"])) :: 8]]
)
"""With every eighth of the other layouts: a model moves to each kind of them in some rows, and so does each option."""
PROOFS: dict[str, str] = _TABLES["proofs"]
"""What tests outside of these matrices prove, and `file::function` under tests/."""
NOT_YET = (
    "CUDA, NCCL, several nodes",
    "Transformer Engine's compiled kernels; the Mamba, gated delta net and latent attention layers of hybrid models",
    "Transformer Engine's attention with `--context-parallel-size`, and with packed sequences",
    "`--tp-comm-overlap` with 1f1b, because Transformer Engine's buffers need a device",
    "the capture of CUDA graphs (`--cuda-graph-impl transformer_engine` and `local`); the order of buffers, and "
    "tensors that outlive a replay, are tested with stand-ins",
    "the kernels of the flex token dispatcher, which need a device, and its backends HybridEP and NCCL EP",
)
"""Neither tested nor refused."""
