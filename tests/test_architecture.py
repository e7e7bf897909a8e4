"""Test that imports go in one direction, and that only some parts of mcore import Megatron."""

import ast
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_vp"

ROOMS = {
    "schedule": set(),
    "trace": {"schedule"},
    "vocab": set(),
    "data": set(),
    "jobs": set(),
    "runtime": {"vocab", "schedule", "trace"},
    "mcore": {"runtime", "vocab", "schedule", "data", "jobs", "cost", "trace"},
    "cost": {"schedule", "trace", "jobs"},
    "cli": {"mcore", "cost", "trace", "schedule", "data", "jobs"},
}
MEGATRON_ROOMS = {
    "platform": set(),
    "storage": {"platform"},
    "model": set(),
    "reports": set(),
    "training": {"model", "reports"},
    "options": {"platform", "storage", "model", "reports"},
    "start": {"platform", "storage", "reports", "options"},
    "replay": {"platform", "reports", "options", "start", "storage"},
}
COST_ROOMS = {
    "hardware": set(),
    "layers": {"hardware"},
    "ranks": {"hardware", "layers"},
    "planning": {"hardware", "layers", "ranks"},
    "paper": {"hardware", "layers", "ranks", "planning"},
}
STARTS = {"patch_table", "megatron_lock"}
"""Files that only the rooms of the start need: they apply patches and check arguments for all others."""
LIBRARIES = {
    "schedule": {"matplotlib"},
    "trace": {"matplotlib"},
    "vocab": {"torch", "triton"},
    "data": {"tokenizers", "transformers", "huggingface_hub"},
    "jobs": {"omegaconf", "yaml"},
    "runtime": {"torch"},
    "mcore": {"torch", "megatron", "yaml", "numpy", "tokenizers"},
    "cost": {"matplotlib", "numpy"},
    "cli": {"typer", "rich"},
}


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def _targets(path):
    """The modules that a file may import: `from package import name` may name a module or what is in one."""
    yield from _imports(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _folders(of):
    return {path.name for path in of.iterdir() if path.is_dir() and path.name != "__pycache__"}


def test_every_folder_is_a_known_room():
    assert _folders(PACKAGE) == set(ROOMS) | {"configs", "slurm"}
    assert _folders(PACKAGE / "mcore") == set(MEGATRON_ROOMS)
    assert _folders(PACKAGE / "cost") == set(COST_ROOMS)
    assert [path.name for path in (PACKAGE / "cost").glob("*.py")] == ["__init__.py"]


def test_no_two_files_have_the_same_name():
    names = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("room", ROOMS)
def test_imports_of_a_room(room):
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for name in _imports(path):
            first, _, rest = name.partition(".")
            if first == "megatron_vp":
                target = rest.partition(".")[0]
                assert target in ROOMS[room] | {room, "errors", "files", "row_counts", ""}, f"{path} imports {name}"
            elif first not in sys.stdlib_module_names:
                assert first in LIBRARIES[room], f"{path} imports {name}"


@pytest.mark.parametrize("room", COST_ROOMS)
def test_imports_of_a_room_of_the_cost_model(room):
    for path in sorted((PACKAGE / "cost" / room).rglob("*.py")):
        for name in _imports(path):
            if name.startswith("megatron_vp.cost."):
                assert name.split(".")[2] in COST_ROOMS[room] | {room}, f"{path} imports {name}"


@pytest.mark.parametrize("room", MEGATRON_ROOMS)
def test_imports_of_a_room_that_knows_megatron(room):
    for path in sorted((PACKAGE / "mcore" / room).rglob("*.py")):
        for name in _imports(path):
            if name.startswith("megatron_vp.mcore."):
                target = name.split(".")[2]
                shared = {"patches", "settled"} | (STARTS if room in ("options", "start") else set())
                assert target in MEGATRON_ROOMS[room] | {room} | shared, f"{path} imports {name}"


def _modules():
    paths = {path: path.relative_to(PACKAGE.parent).with_suffix("").parts for path in PACKAGE.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): path for path, parts in paths.items()}


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside of functions and for types count too."""
    modules = _modules()
    imports = {name: (set(_targets(path)) & modules.keys()) - {name} for name, path in modules.items()}
    assert sum(map(len, imports.values())) > 500
    TopologicalSorter(imports).prepare()  # raises an error that names a circle


def test_schedules_and_help_need_neither_torch_nor_megatron():
    code = (
        "import sys, megatron_vp.cli.app, megatron_vp.schedule.lowering, megatron_vp.schedule.generators, "
        "megatron_vp.cost.paper.tables, megatron_vp.cost.paper.cells, megatron_vp.cost.planning.search, "
        "megatron_vp.trace.figures, megatron_vp.trace.two_runs, "
        "megatron_vp.cost.layers.job_plan, megatron_vp.jobs.config_words, megatron_vp.jobs.resolved;"
        "print(sorted({'torch', 'megatron', 'numpy', 'matplotlib', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
