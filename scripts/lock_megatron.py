"""Write `megatron_vp/mcore/megatron_SERIES.txt`: everything of Megatron that our sources patch, use or read.

    python scripts/lock_megatron.py [--check]

The file describes the Megatron that Python imports, so another release can stand in front on PYTHONPATH:

    PYTHONPATH=/path/to/Megatron-LM python scripts/lock_megatron.py

A line names a symbol that we patch with its signature, a symbol that we use with its signature and the calls in our
sources (`_` is a positional argument, `...` stands for arguments that only the call knows), or an argument that we
read: an option of Megatron's parser. `absent` marks what this release lacks.
Signatures have no annotations. `--check` writes nothing and exits with status 1 if the file is out of date.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_vp.jobs.command_line import option_of  # noqa: E402
from megatron_vp.jobs.options import OPTIONS, OTHER_NAMES, UNREAD  # noqa: E402
from megatron_vp.mcore import patch_table, patches  # noqa: E402
from megatron_vp.mcore.megatron_lock import described, original_of  # noqa: E402
from megatron_vp.mcore.settled import ROLES  # noqa: E402

MCORE = ROOT / "megatron_vp" / "mcore"
SOURCES = (*sorted(MCORE.rglob("*.py")), ROOT / "pretrain_gpt_vp.py")
TABLES = MCORE / "options"
"""Sources with tables of arguments: there, a text that is the name of an option counts as reading the option."""

_BUILD_MODEL = "self, pg_collection, pre_process, post_process, vp_stage"
_FORWARD = "self, input_ids, position_ids, attention_mask, labels, loss_mask"
ANY = "any"
"""Stands for a call of a symbol that may be of any kind."""
CONFIG = "megatron.core.transformer.transformer_config:TransformerConfig"
_OFFLOADS = "megatron.core.pipeline_parallel.fine_grained_activation_offload:PipelineOffloadManager"
REACHED = {
    "megatron.core.models.gpt:GPTModel.forward": _FORWARD,
    "megatron.core.models.gpt:GPTModel._preprocess": ANY,
    "megatron.core.models.gpt:GPTModel._postprocess": ANY,
    "megatron.core.models.gpt:GPTModel._scale_logits": "self, logits",
    "megatron.core.models.gpt:GPTModel.compute_language_model_loss": "self, labels, logits",
    "megatron.core.models.gpt:GPTModel.set_input_tensor": "_, _",
    "megatron.core.models.hybrid.hybrid_model:HybridModel.forward": _FORWARD,
    "megatron.core.models.hybrid.hybrid_model:HybridModel.set_input_tensor": "_, _",
    "megatron.core.models.common.embeddings.language_model_embedding:LanguageModelEmbedding.forward": (
        "self, input_ids, position_ids"
    ),
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock.forward": (
        "self, input_ids, position_ids, hidden_states, attention_mask, embedding"
    ),
    "megatron.training.models.gpt:GPTModelBuilder.build_model": _BUILD_MODEL,
    "megatron.training.models.hybrid:HybridModelBuilder.build_model": _BUILD_MODEL,
    "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout.get_layer_offset": (
        "self, layer_type, vp_stage, pp_rank"
    ),
    "megatron.core.transformer.transformer_layer:TransformerLayerSubmodules": (
        "input_layernorm, mlp, mlp_bda, pre_mlp_layernorm, self_attention, self_attn_bda"
    ),
    "megatron.core.utils:_te_version": ANY,
    "megatron.training.argument_utils:gpt_config_from_args": "_",
    "megatron.training.argument_utils:hybrid_config_from_args": "_",
    "megatron.core.transformer.module:MegatronModule": "config",
    "megatron.core.distributed:DistributedDataParallel.no_sync": "self",
    "megatron.core.distributed:DistributedDataParallel.start_grad_sync": "self",
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.register_grad_ready": "_, _, _",
    "megatron.core.transformer.module:MegatronModule.set_is_first_microbatch": "self",
    "megatron.core.rerun_state_machine:RerunStateMachine.should_run_forward_backward": "_, _",
    "megatron.core.rerun_state_machine:RerunStateMachine.is_unexpectedly_large": "self, result, threshold, context",
    "megatron.core.rerun_state_machine:RerunStateMachine.validate_result": (
        "self, result, rejection_func, message, tolerance, fatal"
    ),
    "megatron.core.timers:Timers": ANY,
    **{
        f"{_OFFLOADS}.{name}": ANY
        for name in ("flush", "init_model_chunk_offload_handler", "pop_forward_chunk", "push")
    },
    **{f"megatron.core.parallel_state:get_{group}_parallel_world_size": "" for group in ROLES["process_groups"]},
}
"""Symbols that our sources reach through Megatron's objects, with a call."""


def symbols_of(tree: ast.AST) -> dict[str, set[str]]:
    """The symbols that a source takes from Megatron, as `module:path`, with its calls of each.

    Of an imported module, these are the symbols read from it; of an imported class, also the attributes read from it.
    A table of names by module counts, too.
    """
    places: dict[str, str] = {}
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    tables: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "megatron":
                places |= {alias.asname or alias.name: _place(module, alias.name) for alias in node.names}
            case ast.Import(names):
                assert not any(alias.name.partition(".")[0] == "megatron" for alias in names), "use `from megatron`"
            case ast.Assign([ast.Name(local)], ast.Call(ast.Attribute(attr="import_module"), [ast.Constant(module)])):
                places[local] = module
            case ast.Dict(keys, values):
                for key, value in zip(keys, values, strict=True):
                    match key, value:
                        case ast.Constant(str(module)), ast.Tuple(names) if module.startswith("megatron."):
                            tables |= {f"{module}:{each.value}" for each in names if isinstance(each, ast.Constant)}
    found: dict[str, set[str]] = defaultdict(set)
    found |= {place: set() for place in places.values() if ":" in place} | {place: {ANY} for place in tables}
    for node in ast.walk(tree):
        match node:
            case ast.Name(local) if ":" in places.get(local, ""):
                target = places[local]
            case ast.Attribute(value=ast.Name(local), attr=name) if local in places:
                target = f"{places[local]}{'.' if ':' in places[local] else ':'}{name}"
            case _:
                continue
        found[target] |= {_shape(calls[id(node)])} if id(node) in calls else set()
    return found


def _place(module: str, name: str) -> str:
    """`module:name`, or the name of a module such as `megatron.core.parallel_state`, also for its other name `mpu`."""
    value = getattr(importlib.import_module(module), name, None)
    if hasattr(value, "__spec__"):
        return value.__name__
    try:
        return f"{module}.{name}" if importlib.util.find_spec(f"{module}.{name}") else f"{module}:{name}"
    except ModuleNotFoundError:
        return f"{module}:{name}"


def _shape(call: ast.Call) -> str:
    """The arguments of a call, such as `_, _, key`."""
    words = ["..." if isinstance(each, ast.Starred) else "_" for each in call.args]
    return ", ".join([*words, *sorted(keyword.arg or "..." for keyword in call.keywords)])


def arguments_of(tree: ast.AST) -> set[str]:
    """The names of arguments that a source reads: `args.NAME`, `job.arguments.NAME`, `getattr(args, "NAME")`.

    Names that begin with an underscore are ours and left out.
    """
    return {name for name in _read_from(tree, {"args", "_args", "a", "parsed"}) if name[0] != "_"}


def _read_from(tree: ast.AST, holders: set[str]) -> Iterator[str]:
    def holds(value: ast.expr) -> bool:
        match value:
            case ast.Attribute(ast.Name("job") | ast.Attribute(attr="job" | "settled") | ast.Call(), "arguments"):
                return "args" in holders
            case ast.Name(name) | ast.Attribute(attr=name) | ast.Call(func=ast.Name(name)):
                return name.removeprefix("get_") in holders
        return False

    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name, ctx=ast.Load()) if holds(value):
                yield name
            case ast.Call(func=ast.Name("getattr"), args=[value, ast.Constant(str(name)), *_]) if holds(value):
                yield name


def _stored(tree: ast.AST) -> set[str]:
    """The arguments that a source sets: `args.NAME = ...` or `chosen["NAME"] = ...`."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name("args"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Subscript(ast.Name("chosen"), ast.Constant(str(name)), ast.Store()):
                found.add(name)
    return found


def _in_records() -> set[str]:
    """The long names of options that decide whether a record refuses a run or warns."""
    records = (option for option in OPTIONS if option.run not in ("", UNREAD))
    return {term.name for option in records for way in option.ways for term in way}


def texts_of(tree: ast.AST) -> set[str]:
    """The words of a source that may be names of arguments in tables: whole texts, and `{name}` in texts."""
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {*texts, *(name for text in texts for name in re.findall(r"{(\w+)}", text))}


def patched_lines() -> Iterator[str]:
    """A line for each symbol that we patch."""
    known = patches.locked("patched")
    for group in patch_table.GROUPS:
        for patch in patch_table.patches_of(group.name):
            found = _found(patch.target)
            keep = patch.target in known and (group.package is not None or found in patch.also.split(" or "))
            yield f"patched {patch.target} {known[patch.target] if keep else found}"


def _found(target: str) -> str:
    try:
        return patches.signature_of(original_of(target))
    except (ImportError, AttributeError):
        return "nothing"


def used_lines(trees: list[ast.AST]) -> Iterator[str]:
    """A line for each symbol that our sources use without patching it."""
    calls: dict[str, set[str]] = defaultdict(set)
    for tree in trees:
        for target, shapes in symbols_of(tree).items():
            calls[target] |= shapes
    fields = {field.name for field in dataclasses.fields(original_of(CONFIG))}
    read = fields & {name for tree in trees for name in _read_from(tree, {"config"})}
    calls[CONFIG].add(", ".join([*sorted(read), "..."]))
    for target in sorted({*calls, *REACHED}):
        shapes = calls[target] | {REACHED[target] for each in REACHED if each == target}
        try:
            found = described(original_of(target))
            found = ANY if ANY in shapes else found
        except (ImportError, AttributeError):
            yield f"absent {target}"
            continue
        called = " called " + " ".join(f"({shape})" for shape in sorted(shapes)) if shapes - {ANY} else ""
        yield f"used {target} {found}{called}"


def argument_lines(trees: dict[Path, ast.AST]) -> Iterator[str]:
    """A line for each argument that our sources read, except our own."""
    from megatron.training import arguments

    from megatron_vp.mcore.options.arguments import with_ours

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    theirs = {each.dest for each in parser._actions}
    by_option = {name: each.dest for name, each in parser._option_string_actions.items()}
    ours = {each.dest for each in with_ours(lambda parser: parser)(argparse.ArgumentParser())._actions}
    derived = _stored(ast.parse(inspect.getsource(arguments)))
    stored = {name for tree in trees.values() for name in _stored(tree)}
    read = {name for tree in trees.values() for name in arguments_of(tree)}
    read |= {by_option.get(option_of(name), OTHER_NAMES.get(name, name)) for name in _in_records()}
    tables = {name for path in trees if TABLES in path.parents for name in texts_of(trees[path])}
    tables |= {name for names in ROLES.values() for name in names}
    for name in sorted((read | (theirs & tables)) - ours):
        if name in theirs:
            yield f"option {name}"
        elif name not in derived | stored:
            yield f"absent {name}"


def content() -> str:
    """The content of the file."""
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    lines = {*patched_lines(), *used_lines(list(trees.values())), *argument_lines(trees)}
    name = Path(__file__).relative_to(ROOT)
    return f"# Made by {name} from the installed Megatron and our sources; do not edit.\n" + "".join(
        f"{line}\n" for line in sorted(lines)
    )


def main() -> None:
    """Write the file or, with `--check`, compare it with the expected content."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    file, expected = patches.lock_file(), content()
    if not check:
        file.write_text(expected)
    elif file.read_text() != expected:
        sys.exit(f"{file.relative_to(ROOT)} is out of date: run python {Path(__file__).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
