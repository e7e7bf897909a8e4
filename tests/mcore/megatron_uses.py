"""Collect what our sources use of Megatron: imported symbols, fields of its configuration, and its arguments."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "pretrain_gpt_vp.py"


def sources() -> Iterator[tuple[str, Path]]:
    """Every file that may know Megatron, with its room: a folder of `mcore/`, `mcore` itself, or the script."""
    mcore = ROOT / "megatron_vp" / "mcore"
    for path in sorted(mcore.rglob("*.py")):
        inside = path.relative_to(mcore).parts
        yield (inside[0] if len(inside) > 1 else "mcore"), path
    yield SCRIPT, ROOT / SCRIPT


def symbols_of(text: str) -> set[str]:
    """The symbols that a source imports from Megatron, as `module:path`.

    Of an imported module those that are read from it by name; of an imported class also the attributes that are.
    """
    tree = ast.parse(text)
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "megatron":
            imported |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            assert not any(alias.name.partition(".")[0] == "megatron" for alias in node.names), "use `from megatron`"
    read = defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            read[node.value.id].add(node.attr)
    found = set()
    for local, (module, name) in imported.items():
        if _is_module(found_module := _module_name(module, name)):
            found |= {f"{found_module}:{attribute}" for attribute in read[local]}
        else:
            found |= {f"{module}:{name}", *(f"{module}:{name}.{attribute}" for attribute in read[local])}
    return found


def _module_name(module: str, name: str) -> str:
    """`megatron.core.parallel_state`, also for `mpu`, its other name."""
    value = getattr(importlib.import_module(module), name, None)
    return value.__name__ if hasattr(value, "__spec__") else f"{module}.{name}"


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


_HOLDERS = {"args", "_args", "a", "parsed"}
"""Names of variables that hold Megatron's arguments in our sources."""


def arguments_of(text: str) -> set[str]:
    """The names of arguments that a source reads: `args.NAME`, `get_args().NAME`, `getattr(args, "NAME")`.

    For the last also where NAME runs over a tuple in a loop. What begins with an underscore is ours, and left out.
    """
    tree = ast.parse(text)
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name, ctx=ast.Load()) if _holds_arguments(value):
                found.add(name)
            case ast.Call(func=ast.Name("getattr"), args=[value, ast.Constant(str(name)), *_]) if _holds_arguments(
                value
            ):
                found.add(name)
            case ast.For(target=ast.Name(each), iter=ast.Tuple(elts)) if _reads_by_name(node, each):
                found |= {element.value for element in elts}
    return {name for name in found if not name.startswith("_")}


def _holds_arguments(value: ast.expr) -> bool:
    match value:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name in _HOLDERS
        case ast.Call(func=ast.Name("get_args")):
            return True
    return False


def _reads_by_name(loop: ast.For, each: str) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and _holds_arguments(node.args[0])
        and isinstance(node.args[1], ast.Name)
        and node.args[1].id == each
        for node in ast.walk(loop)
    )
