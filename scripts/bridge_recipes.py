"""List which of Megatron-Bridge's performance recipes would be accepted with `--vocab-parallel`.

    PYTHONPATH=FOLDER python scripts/bridge_recipes.py [--write] [--list] [--simulate]

FOLDER contains Megatron-Bridge and the packages that it imports (see `tests/mcore/bridge_loop.py`). The script builds
each recipe for H100, B200 and GB300 that has two or more pipeline stages, with the sizes of its Hugging Face model
below, and turns it into Megatron's flags. It checks these flags in the same way as `scripts/nvidia_jobs.py` checks
NVIDIA's other jobs. Changes that a recipe makes to the built model (adapters, frozen weights) have no flag and are not
checked. Nothing is downloaded or started.

`--simulate` instead predicts the pretraining recipes: plain, with `--vocab-parallel` alone, and the fastest and the
smallest run that `megatron-vp plan` finds. Times and memory are given for the GPUs that the cost model knows. Recipes
for other GPUs are simulated on B200, only to list which are refused and which of their options are not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import importlib.machinery
import json
import logging
import pkgutil
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import nvidia_jobs  # noqa: E402
from nvidia_jobs import Job  # noqa: E402

from megatron_vp.cli.app import app  # noqa: E402
from megatron_vp.mcore.start import preflight  # noqa: E402
from tests.mcore import bridge_loop  # noqa: E402

FAMILIES = ("deepseek", "gpt_oss", "kimi", "llama", "nemotronh", "qwen")
GPUS = {"h100": "9.0", "b200": "10.0", "gb300": "10.3"}
"""The GPUs whose recipes are judged, and their compute capabilities."""
SIMULATED = ("h100", "b200")
"""The GPUs among them that the cost model knows."""
OTHERS = ("b300", "gb200", "r100", "vr200")
"""Further GPUs for which there are recipes."""
GIB = 2**30
_NOT_HERE = ("diffusers", "nvidia_resiliency_ext", "megatron.energon")
_OF_OTHER_MODELS = ("megatron.bridge.diffusion", "megatron.bridge.recipes.flux", "megatron.bridge.recipes.wan")
_CALLED_OTHERWISE = {
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "gated_linear_unit": "swiglu",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "fp8_param": "fp8_param_gather",
}
_LEFT_OUT = {
    # Options that are set below, that describe a process, or that choose the kernel of a fused loss.
    *("moe_layer_freq", "pipeline_model_parallel_layout", "position_embedding_type", "hidden_dropout"),
    *("attention_dropout", "rank", "world_size", "data_parallel_size", "cross_entropy_fusion_impl"),
    # Settings of kernels and layers that Megatron's flags cannot express.
    *("attention_backend", "softmax_type", "window_size", "linear_attention_freq", "experimental_attention_variant"),
    *("glu_linear_offset", "rotary_base_local", "moe_deepep_num_sms", "moe_hybridep_num_sms", "overlap_p2p_comm"),
    *("batch_p2p_comm", "hierarchical_context_parallel_sizes", "mtp_loss_scaling_factor"),
}
_LETTERS = {"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}


class _StandIns:
    """Replaces missing packages, and models that are not judged, by modules that have every attribute."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.startswith(_OF_OTHER_MODELS) or any(f"{name}.".startswith(f"{each}.") for each in _NOT_HERE):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> Any:
        module = bridge_loop._Anything(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: Any) -> None:
        pass


def models() -> dict[str, Any]:
    """The configurations of the recipes' Hugging Face models whose sizes are public and easy to state."""
    import transformers as hf

    def llama(hidden: int, intermediate: int, layers: int, heads: int) -> Any:
        sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
        kinds = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "rope_theta": 500000.0}
        return hf.LlamaConfig(**sizes, **kinds, num_attention_heads=heads, num_key_value_heads=8)

    def qwen3(hidden: int, intermediate: int, layers: int, heads: int, of_expert: int) -> Any:
        sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
        experts = {"moe_intermediate_size": of_expert, "num_experts": 128, "num_experts_per_tok": 8}
        kinds = {"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "head_dim": 128}
        return hf.Qwen3MoeConfig(**sizes, **experts, **kinds, num_attention_heads=heads, num_key_value_heads=4)

    deepseek = {"architectures": ["DeepseekV3ForCausalLM"]}
    kimi = {"n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840}
    kimi |= {"num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return {
        "meta-llama/Meta-Llama-3-8B": llama(4096, 14336, 32, 32),
        "meta-llama/Meta-Llama-3-70B": llama(8192, 28672, 80, 64),
        "meta-llama/Meta-Llama-3.1-405B": llama(16384, 53248, 126, 128),
        "Qwen/Qwen3-30B-A3B": qwen3(2048, 6144, 48, 32, 768),
        "Qwen/Qwen3-235B-A22B": qwen3(4096, 12288, 94, 64, 1536),
        "Qwen/Qwen3-Next-80B-A3B-Instruct": hf.Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"]),
        "deepseek-ai/DeepSeek-V3": hf.DeepseekV3Config(**deepseek),
        "moonshotai/Kimi-K2-Instruct": hf.DeepseekV3Config(**deepseek, **kimi),
        "openai/gpt-oss-120b": hf.GptOssConfig(architectures=["GptOssForCausalLM"]),
    }


def recipes(gpus: Iterable[str]) -> Iterator[tuple[str, str, str, Any]]:
    """Yield (family, GPU, name, configuration) for every recipe for `gpus` whose model is known."""
    bridge_loop.import_bridge()
    sys.meta_path.insert(0, _StandIns())
    from megatron.bridge import AutoBridge

    known = models()
    AutoBridge.from_hf_pretrained = staticmethod(lambda model, **_: AutoBridge.from_hf_config(known[model]))
    for family in FAMILIES:
        for gpu in gpus:
            if importlib.util.find_spec(f"megatron.bridge.perf_recipes.{family}.{gpu}") is None:
                continue
            package = importlib.import_module(f"megatron.bridge.perf_recipes.{family}.{gpu}")
            for each in pkgutil.iter_modules(package.__path__):
                module = importlib.import_module(f"{package.__name__}.{each.name}")
                for name, make in list(vars(module).items()):
                    public = name.endswith("_config") and not name.startswith("_")
                    if public and getattr(make, "__module__", "") == module.__name__:
                        try:
                            yield family, gpu, name.removesuffix("_config"), make()
                        except KeyError as unknown:
                            logging.getLogger(__name__).warning("%s: sizes of %s are not known", name, unknown)


def words_of(recipe: Any, options: dict[str, Any]) -> list[str]:
    """Turn a recipe into Megatron's flags: all settings that differ from the defaults of `options`, which are given by
    name.
    """
    model, train = recipe.model, recipe.train
    if hasattr(recipe.mixed_precision, "setup"):
        recipe.mixed_precision.setup(model, recipe.optimizer, recipe.ddp)
    said = {"moe_layer_freq": None}
    for part in filter(None, (recipe.ddp, recipe.optimizer, getattr(model, "transformer", None), model)):
        said |= {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    if said.get("cuda_graph_impl") == "transformer_engine" and said.get("cuda_graph_scope"):  # its deprecated name
        said["cuda_graph_modules"] = said["cuda_graph_scope"]
    words: list[str] = []
    for name, value in said.items():
        option = options.get(_CALLED_OTHERWISE.get(name, name))
        left_out = name in _LEFT_OUT or name.startswith("megatron_fsdp")
        if option is not None and not left_out and value is not None and not callable(value):
            words += _typed(option, value)
    overlap = recipe.comm_overlap
    for name in ("tp_comm_overlap", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"):
        option = f"--{name.replace('_', '-')}"
        alone = name == "tp_comm_overlap" and model.tensor_model_parallel_size == 1  # Bridge then switches it off
        if getattr(overlap, name, False) and option not in words and not alone:
            words.append(option)
    words += [*("--tokenizer-type", "NullTokenizer", "--mock-data", "--train-iters", "10", "--lr", "1e-4")]
    words += [*("--lr-decay-style", "constant", "--eval-iters", "0", "--eval-interval", "100")]
    words += ["--vocab-size", str(model.vocab_size), "--max-position-embeddings", str(max(model.seq_length, 8192))]
    words += ["--micro-batch-size", str(train.micro_batch_size), "--global-batch-size", str(train.global_batch_size)]
    words += ["--hidden-dropout", str(model.hidden_dropout), "--attention-dropout", str(model.attention_dropout)]
    words += ["--position-embedding-type", model.position_embedding_type]
    words += ["--bf16"] * ("--bf16" not in words)
    words += ["--grad-reduce-in-bf16"] * (not recipe.ddp.grad_reduce_in_fp32)
    words += ["--group-query-attention"] * (model.num_query_groups not in (None, model.num_attention_heads))
    words += ["--untie-embeddings-and-output-weights"] * (not model.share_embeddings_and_output_weights)
    if not recipe.rerun_state_machine.check_for_nan_in_loss or model.cuda_graph_impl == "full_iteration":
        words.append("--no-check-for-nan-in-loss-and-grad")
    if getattr(model, "moe_layer_freq", 1) not in (1, None):
        words += ["--moe-layer-freq", str(model.moe_layer_freq).replace(" ", "")]
    if model.pipeline_model_parallel_layout is not None:
        stages = "--num-virtual-stages-per-pipeline-rank"
        if stages in words:
            place = words.index(stages)
            words[place : place + 2] = []
        words += ["--pipeline-model-parallel-layout", _layout(model.pipeline_model_parallel_layout)]
    return words


def _typed(option: Any, value: Any) -> list[str]:
    (flag, *others), default = option.option_strings, option.default
    if isinstance(option, argparse._StoreTrueAction):
        return [flag] * (value is True)
    if isinstance(option, argparse._StoreFalseAction):
        return [flag] * (value is False)
    if isinstance(option, argparse.BooleanOptionalAction):
        return [flag if value else others[-1]] * (value != default)
    if isinstance(value, list | tuple):
        return [flag, *map(_text, value)] * bool(value)
    return [flag, _text(value)] * (value != default)


def _text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float) and value > 1 and value == int(value):
        return str(int(value))
    narrow = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}
    return narrow.get(str(value), str(value))


def _layout(layout: Any) -> str:
    if isinstance(layout, str):
        return layout
    stages = getattr(layout, "layout", layout)
    if stages is not layout:  # by rank and chunk
        stages = [stage for chunk in zip(*stages, strict=True) for stage in chunk]
    return "|".join("".join(_LETTERS[str(layer).rpartition(".")[2]] for layer in stage) for stage in stages)


class Simulated(NamedTuple):
    """A recipe's predicted runs as in JSON documents: plain, with `--vocab-parallel` alone and, of those that `plan`
    finds at the recipe's sizes, the fastest and the smallest that takes at most 1 % more time than the recipe. Without
    runs, the first refusal.
    """

    family: str
    gpu: str
    name: str
    found: tuple[dict[str, Any], ...] = ()
    uncounted: tuple[str, ...] = ()
    refusal: str = ""
    megatron: str | None = None
    """Why plain Megatron would refuse the recipe too."""

    def ratio(self, way: int = 1) -> float:
        """Time of the plain recipe over that of another of its runs."""
        return self.found[0]["iteration_seconds"] / self.found[way]["iteration_seconds"]

    @property
    def memory(self) -> list[float]:
        """GiB of the fullest rank, by run."""
        return [each["peak_memory_bytes"] / GIB for each in self.found]


def simulated(gpu: str, job: Job) -> Simulated:
    """Predict a recipe's runs. If that is refused, `megatron-vp check` says whether plain Megatron refuses it, too.

    The number of GPUs is that of the recipe's name or, if this is not a multiple of a replica, that of one replica.
    `plan` may use the GPU's memory or, if that is more, as much as the recipe.
    """
    family, name, words = job.group, job.name, job.words
    gpus = int(re.search(r"(\d+)gpu", name)[1])  # type: ignore[index]
    gpus = gpus if gpus % job.ranks == 0 else job.ranks
    hardware = ["--hardware", gpu if gpu in SIMULATED else "b200", "--nodes", str(max(1, gpus // 8))]
    found, uncounted, limit = list[dict[str, Any]](), list[str](), 0.0
    for command in (["simulate"], ["simulate", "--vocab-parallel"], *[["plan"]] * (gpu in SIMULATED)):
        if command[0] == "plan":
            command += ["--memory", str(max(found[0]["peak_memory_bytes"], limit) / GIB)]
        said = CliRunner().invoke(app, [*command, *words, *hardware, "--format", "json"])
        if said.exit_code:
            why = str(said.exception) if said.exit_code != 2 or not said.stderr else said.stderr.strip()
            refusal = " ".join([*command[1:2], why])
            return Simulated(family, gpu, name, refusal=refusal, megatron=job.answers()[0])
        document = json.loads(said.stdout)
        limit, uncounted = document["limit_bytes"], document["uncounted"]
        if command[0] == "simulate":
            found.append(document["plan"])
        else:
            frontier = [document["plans"][place] for place in document["frontier"]]
            within = [each for each in frontier if 0.99 * each["iteration_seconds"] <= found[0]["iteration_seconds"]]
            found += [frontier[0], (within or frontier[:1])[-1]]
    return Simulated(family, gpu, name, tuple(found), tuple(uncounted))


def by_family(rows: Sequence[Simulated]) -> str:
    """A table of times and memory by family and GPU, for the GPUs that the cost model knows."""
    known = [row for row in rows if row.found and row.gpu in SIMULATED]
    lines = ["| recipes | number | split | best | GiB | split | best | smallest |", "|---" * 8 + "|"]
    groups = dict.fromkeys((row.family, row.gpu) for row in known)
    for group in [*groups, None]:
        those = [row for row in known if group in (None, (row.family, row.gpu))]
        if those:
            ratios = [[row.ratio(way) for row in those] for way in (1, 2)]
            numbers = " | ".join(f"{fmean(each):.3f} ({min(each):.3f})" for each in ratios)
            memory = " | ".join(f"{fmean(row.memory[way] for row in those):.1f}" for way in range(4))
            name = f"{group[0]} {group[1].upper()}" if group else "**all**"
            lines.append(f"| {name} | {len(those)} | {numbers} | {memory} |")
    return "\n".join(lines)


def simulated_tables(rows: Sequence[Simulated]) -> str:
    """Tables of times and memory by recipe, of refusals, and of options that are not counted."""
    lines = ["| recipe | s | split | best | smallest | GiB | split | best | smallest | best run |", "|---" * 10 + "|"]
    for row in [each for each in rows if each.found and each.gpu in SIMULATED]:
        seconds = " | ".join(f"{each['iteration_seconds']:.4g}" for each in row.found)
        memory = " | ".join(f"{each:.1f}" for each in row.memory)
        best = row.found[2]
        lines.append(f"| {row.name} | {seconds} | {memory} | {best['schedule']} {best['method']} |")
    lines += ["", "| refused by simulate | Megatron runs it | recipes | such as |", "|---" * 4 + "|"]
    kinds: dict[tuple[str, bool], list[str]] = {}
    for row in rows:
        if not row.found:
            kind = re.sub(r"\d+", "N", row.refusal.removeprefix("--vocab-parallel ").removeprefix("Error: "))[:140]
            kinds.setdefault((kind, row.megatron is None), []).append(row.name)
    for (kind, runs), names in sorted(kinds.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {kind} | {'yes' if runs else 'no'} | {len(names)} | {names[0]} |")
    by_gpu = Counter(f"{row.gpu}{'' if row.found else ', refused'}" for row in rows)
    lines += ["", "Recipes by GPU: " + ", ".join(f"{gpu} {count}" for gpu, count in sorted(by_gpu.items())), ""]
    options = Counter(option for row in rows for option in row.uncounted)
    lines += ["| option that is not counted | recipes |", "|---|---|"]
    return "\n".join([*lines, *(f"| {option} | {count} |" for option, count in options.most_common())])


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--write", action="store_true", help=f"put the tables into {nvidia_jobs.PAGE.relative_to(ROOT)}"
    )
    parser.add_argument("--list", action="store_true", help="first print every recipe and whether it is accepted")
    parser.add_argument("--simulate", action="store_true", help="predict the pretraining recipes, and print tables")
    parser.add_argument("--words", action="store_true", help="only print every recipe's name and flags, as JSON")
    given = parser.parse_args()
    if (missing := bridge_loop.missing()) is not None:
        parser.error(missing)
    logging.disable(logging.INFO)
    with preflight.without_compilers():
        from megatron.training.arguments import add_megatron_arguments

    megatron = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    options = {option.dest: option for option in megatron._actions}
    answers: dict[Job, tuple[str | None, ...]] = {}
    predicted: list[Simulated] = []
    for family, gpu, name, recipe in recipes((*GPUS, *OTHERS) if given.simulate or given.words else GPUS):
        if recipe.model.pipeline_model_parallel_size > 1:
            queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "1" if gpu == "h100" else "32"}
            nodes = nvidia_jobs.nodes(GPUS.get(gpu, "10.0"))
            job = Job(f"{family}", name, tuple(words_of(recipe, options)), queues, nodes)
            if given.simulate:
                if "pretrain" in name:
                    predicted.append(simulated(gpu, job))
                    row = predicted[-1]
                    said = row.refusal or [round(row.ratio(way), 3) for way in range(1, len(row.found))]
                    print(name, said, file=sys.stderr, flush=True)
                continue
            if given.words:
                print(json.dumps([name, job.words]), flush=True)
                continue
            answers[job] = job.answers()
            if given.list:
                print(name, *(answer or "accepted" for answer in answers[job]), sep=" | ", flush=True)
    if given.words:
        return 0
    from megatron.bridge.package_info import __version__

    if given.simulate:
        print(table := by_family(predicted), simulated_tables(predicted), sep="\n\n")
        if given.write:
            said = (
                f"Recipes for H100 and B200, Megatron-Bridge {__version__}: plain time over a run's, mean (least), "
                "then mean GiB. *Split*: `--vocab-parallel` alone; *best* and *smallest*: `plan`'s fastest run with "
                "the recipe's sizes, and its smallest within 1 % of the recipe's time:"
            )
            nvidia_jobs.write("predicted", f"{said}\n\n{table}")
        return 0
    written = nvidia_jobs.tables(f"Results for Megatron-Bridge {__version__}", answers)
    if given.write:
        nvidia_jobs.write("recipes", written)
    else:
        print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
