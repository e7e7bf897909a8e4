"""Test the set-up script: the Python that it chooses, its message without one, and a second run."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
RECIPES = ("pyproject.toml", "setup.py")
# Answers as the interpreter does, but stops at the step that makes the environment.
STAND_IN = f'#!/bin/bash\n[[ $1 == -m ]] && {{ echo "venv by $0" >&2; exit 7; }}\nexec {sys.executable} "$@"\n'
# An environment whose pip has nothing to do, and whose imports succeed or fail.
INSTALLED = f'#!/bin/bash\n[[ $1 == -m ]] && exit 0\n[[ $1 == -W ]] && exit {{imports}}\nexec {sys.executable} "$@"\n'


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "repo" / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup_env.sh", tmp_path / "repo" / "scripts")
    shutil.copy(CONSTRAINTS, tmp_path / "repo" / "scripts")
    for name in RECIPES:
        shutil.copy(ROOT / name, tmp_path / "repo")
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "rm", "mkdir", "mv", "flock"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def place(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)
    return path


# A Python that makes such environments, as `installed` does below; its pip does what a file `pip` says.
MAKER = """#!/bin/bash
if [[ $1 == -m && $2 == venv ]]; then mkdir -p $3/bin; cp "$0" $3/bin/python; exit; fi
if [[ $1 == -m ]]; then echo "$*" >>pip.log; source ./pip; exit; fi
[[ $1 == -W ]] && exit 0
exec {python} "$@"
"""


def installed(checkout, imports=0):
    """An environment of the script's own making that is not complete."""
    place(checkout / "repo" / ".venv" / "bin" / "python", INSTALLED.format(imports=imports))
    (checkout / "repo" / ".venv" / ".megatron_vp_own").touch()


def set_up(checkout, *options, **variables):
    """Run the script on a machine that has nothing but what the test put into bin/ and the home directory."""
    environment = {"PATH": str(checkout / "bin"), "HOME": str(checkout / "home"), **variables}
    script = checkout / "repo" / "scripts" / "setup_env.sh"
    return subprocess.run(["bash", str(script), *options], env=environment, capture_output=True, text=True, timeout=60)


def test_without_python_one_sentence_says_what_to_install(checkout):
    result = set_up(checkout)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and "install one" in result.stderr


def test_variable_chooses_and_is_not_replaced_in_silence(checkout):
    place(checkout / "bin" / "python3.12", STAND_IN)
    chosen = place(checkout / "mine", STAND_IN)
    assert f"venv by {chosen}" in set_up(checkout, PYTHON=str(chosen)).stderr
    result = set_up(checkout, PYTHON="/no/such/python")
    assert result.returncode == 1 and "PYTHON=/no/such/python" in result.stderr and "venv by" not in result.stderr


@pytest.mark.parametrize("name", [*RECIPES, "scripts/constraints.txt"])
def test_complete_environment_is_reused_until_its_recipe_changes(checkout, name):
    installed(checkout)
    first, second = set_up(checkout), set_up(checkout)
    assert first.returncode == 0 and "installing" in first.stderr
    assert (second.returncode, second.stderr) == (0, "")
    with (checkout / "repo" / name).open("a") as recipe:
        recipe.write("# a new dependency")
    assert "installing" in set_up(checkout).stderr


def test_environment_that_cannot_import_is_made_anew(checkout):
    installed(checkout, imports=1)
    found = place(checkout / "bin" / "python3.12", STAND_IN)
    result = set_up(checkout)
    assert "damaged; recreating it" in result.stderr and f"venv by {found}" in result.stderr
    assert [path.name for path in (checkout / "repo" / ".venv").iterdir()] == [".megatron_vp_own"]


def maker(checkout, pip="true"):
    """A machine whose Python makes environments, with a pip that does `pip` in bash."""
    for tool in ("cp", "mkdir"):
        (checkout / "bin" / tool).unlink(missing_ok=True)
        (checkout / "bin" / tool).symlink_to(shutil.which(tool))
    place(checkout / "bin" / "python3.12", MAKER.format(python=sys.executable))
    (checkout / "repo" / "pip").write_text(f"[[ $3 == --version ]] || {pip}")


@pytest.mark.parametrize("has_pip", [False, True], ids=["without pip", "with pip"])
def test_an_environment_of_the_users_own_is_kept(checkout, has_pip):
    maker(checkout)
    place(checkout / "repo" / ".venv" / "bin" / "python", STAND_IN if not has_pip else INSTALLED.format(imports=0))
    (checkout / "repo" / ".venv" / "MY_PACKAGES").write_text("precious")
    result = set_up(checkout)
    assert result.returncode == 0, result.stderr
    assert ".venv was not created by this script, so it is now called .venv.kept" in result.stderr
    assert (checkout / "repo" / ".venv.kept" / "MY_PACKAGES").read_text() == "precious"
    assert not (checkout / "repo" / ".venv" / "MY_PACKAGES").exists()
    assert (set_up(checkout).returncode, set_up(checkout).stderr) == (0, "")


@pytest.mark.parametrize(
    "end", ["kill -KILL $$", "kill -TERM $PPID; sleep 1; exit 1", "kill -HUP $PPID; sleep 1; exit 1", "exit 1"]
)
def test_an_interrupted_installation_is_taken_up_again(checkout, end):
    maker(checkout, pip=end)
    assert set_up(checkout).returncode != 0
    assert not (checkout / "repo" / ".venv" / ".megatron_vp_complete").exists()
    maker(checkout)
    result = set_up(checkout)
    assert result.returncode == 0 and "creating" not in result.stderr and "is ready" in result.stderr, result.stderr
    assert not (checkout / "repo" / ".venv.kept").exists()
    assert (set_up(checkout).returncode, set_up(checkout).stderr) == (0, "")


def test_a_containers_packages_are_seen_and_kept(checkout):
    maker(checkout)
    python = checkout / "bin" / "python3.12"
    seen = "echo include-system-site-packages = true >$4/pyvenv.cfg"
    python.write_text(
        python.read_text().replace(
            "if [[ $1 == -m && $2 == venv ]]; then",
            'if [[ "$1 $2 $3" == "-m venv --system-site-packages" ]]; then\n'
            f'mkdir -p $4/bin; {seen}; cp "$0" $4/bin/python; exit; fi\nif [[ $1 == -m && $2 == venv ]]; then',
        )
    )
    assert set_up(checkout).returncode == 0
    first = set_up(checkout, "--system-site-packages", PIP_CONSTRAINT="/etc/pip/constraint.txt")
    assert first.returncode == 0 and "recreating .venv, because it does not see this machine's packages" in first.stderr
    assert "--constraint .venv/shared_constraints.txt" in (checkout / "repo" / "pip.log").read_text().splitlines()[-1]
    pins = (checkout / "repo" / ".venv" / "shared_constraints.txt").read_text().splitlines()
    for name in ("torch", "numpy"):
        assert f"{name}=={importlib.metadata.version(name)}" in pins
    assert len([pin for pin in pins if pin.startswith("torch==")]) == 1
    assert not [pin for pin in pins if pin.startswith(("typer", "transformers="))], "here, and may be made newer"
    # It stays so for all who ask for the environment, such as scripts/test.sh.
    for options in ((), ("--system-site-packages",)):
        assert (set_up(checkout, *options).returncode, set_up(checkout, *options).stderr) == (0, "")
    refused = set_up(checkout, "--latest")
    assert refused.returncode == 2 and "leave out --latest" in refused.stderr
    place(checkout / "bin" / "python3.13", STAND_IN.replace("exec", "[[ $2 == *metadata* ]] && exit 1\nexec"))
    without = set_up(checkout, "--system-site-packages", PYTHON=str(checkout / "bin" / "python3.13"))
    assert without.returncode == 0, "what is complete needs no interpreter"
    shutil.rmtree(checkout / "repo" / ".venv")
    without = set_up(checkout, "--system-site-packages", PYTHON=str(checkout / "bin" / "python3.13"))
    assert without.returncode == 1 and "and with PyTorch, which --system-site-packages shares" in without.stderr


@pytest.mark.parametrize("compiles", [True, False])
def test_a_machine_with_a_gpu_gets_transformer_engine(checkout, compiles):
    maker(checkout)
    python = checkout / "bin" / "python3.12"
    python.write_text(
        python.read_text().replace("[[ $1 == -W ]]", "[[ $* == *transformer_engine* ]] && exit 1\n[[ $1 == -W ]]")
    )
    engine = place(
        checkout / "repo" / "scripts" / "setup_transformer_engine.sh",
        f'#!/bin/bash\necho "engine $*"; exit {int(not compiles)}\n',
    )
    assert "engine" not in set_up(checkout).stderr, "no GPU"
    with (checkout / "repo" / "pyproject.toml").open("a") as recipe:
        recipe.write("# another dependency")
    place(checkout / "bin" / "nvidia-smi", "#!/bin/bash\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'\n")
    result = set_up(checkout)
    assert result.returncode == 0 and "engine --build" in result.stderr and engine.is_file()
    assert ("Transformer Engine was not installed (see above)" in result.stderr) == (not compiles)
    assert ".venv is ready" in result.stderr and set_up(checkout).stderr == ""


def test_the_versions_that_were_tested_are_installed_and_the_newest_when_asked(checkout):
    maker(checkout)
    log = checkout / "repo" / "pip.log"

    def install(*options):
        log.write_text("")
        result = set_up(checkout, *options)
        assert result.returncode == 0, result.stderr
        return [line for line in log.read_text().splitlines() if " install " in line]

    (pinned,) = install()
    assert "--constraint scripts/constraints.txt" in pinned and "--upgrade" not in pinned
    assert install() == []
    for _ in range(2):  # there may be newer ones each time
        (newest,) = install("--latest")
        assert "--upgrade --upgrade-strategy eager" in newest and "--constraint" not in newest
    assert install() == [pinned], "back to those that were tested"
    with (checkout / "repo" / "scripts" / "constraints.txt").open("a") as file:
        file.write("other==1.0\n")
    assert install() == [pinned]
    assert set_up(checkout, "--newest").returncode == 2


def test_every_package_of_the_project_has_its_version_written_down():
    """All that `pip install .[test,docs]` would bring on this machine, by what the installed packages ask for."""
    pinned = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    found, waiting = set(), [Requirement("megatron_vp[test,docs]")]
    while waiting:
        asked = waiting.pop()
        key = canonicalize_name(asked.name), frozenset(asked.extras)
        if key in found:
            continue
        found.add(key)
        # Not the first of that name: `scripts/test.sh --megatron` puts another megatron-core in front of it.
        installed = importlib.metadata.distributions(name=asked.name)
        fitting = next(each for each in installed if asked.specifier.contains(each.version, prereleases=True))
        for text in fitting.requires or ():
            needed = Requirement(text)
            if any(needed.marker is None or needed.marker.evaluate({"extra": extra}) for extra in (*asked.extras, "")):
                waiting.append(needed)
    names = {name for name, _ in found} - {"megatron-vp"}
    assert len(names) > 80 and names <= pinned.keys(), names - pinned.keys()


def run_test_sh(checkout, failing, *options):
    """Exit status of `test.sh` where commands that contain `failing` fail, what it runs, and what it prints."""
    shutil.copy(ROOT / "scripts" / "test.sh", checkout / "repo" / "scripts")
    place(checkout / "repo" / "scripts" / "setup_env.sh", "#!/bin/bash\n")
    for tool in ("ruff", "python"):
        runs = f'#!/bin/bash\necho "{tool} $*" >>ran.log\necho "says $*"\n[[ "$*" != *"{failing}"* ]]\n'
        place(checkout / "repo" / ".venv" / "bin" / tool, runs)
    command = ["bash", str(checkout / "repo" / "scripts" / "test.sh"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, (checkout / "repo" / "ran.log").read_text().splitlines(), done.stdout


def test_quick_runs_lint_types_and_tests_that_exist(checkout):
    status, ran, _ = run_test_sh(checkout, "nothing", "--quick", "-x")
    assert status == 0 and {"ruff check .", "python -m mypy"} <= {*ran}
    lanes = [line for line in ran if "pytest" in line]
    assert len(lanes) == 2 and all(line.endswith(" -x") for line in lanes)
    named = [word for line in lanes for word in line.split() if word.startswith("tests/")]
    assert len(named) > 15 and [word for word in named if not (ROOT / word).is_file()] == []
    assert "tests/mcore/test_parity.py" in named


def left_out(lane):
    """What the words of a pytest command ignore."""
    return {word.removeprefix("--ignore=") for word in lane if word.startswith("--ignore=")}


def test_each_test_is_in_one_lane_and_each_lane_says_how_long_it_took(checkout):
    status, ran, said = run_test_sh(checkout, "nothing")
    assert status == 0 and {"ruff check .", "python -m mypy"} <= {*ran}
    lanes = [line.split() for line in ran if "pytest" in line]
    for file in ROOT.glob("tests/**/test_*.py"):
        places = {str(place.relative_to(ROOT)) for place in (file, *file.parents[:-1]) if place.is_relative_to(ROOT)}
        assert sum(bool(places & {*lane}) and not places & left_out(lane) for lane in lanes) == 1, file
    assert all((ROOT / word).exists() for lane in lanes for word in left_out(lane))
    took = [line for line in said.splitlines() if " took " in line]
    assert [line.partition(" took ")[0] for line in took] == [
        "the tests under Megatron",
        "the type checker",
        "the tests that mostly wait",
        "all other tests",
    ]
    # The lanes' outputs are not mixed.
    assert said.splitlines().index(took[0]) < said.splitlines().index("says -m mypy")


@pytest.mark.parametrize("options", [[], ["--quick"]], ids=["all", "quick"])
@pytest.mark.parametrize("failing", ["format", "mypy", "tests/vocab", "tests/mcore", "--ignore"])
def test_any_part_that_fails_fails_the_whole(checkout, options, failing):
    expected = not (failing == "--ignore" and options) and not (failing == "tests/vocab" and not options)
    assert (run_test_sh(checkout, failing, *options)[0] != 0) == expected
