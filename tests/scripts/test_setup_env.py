"""The set-up script: which Python it takes, what it says without one, and when it has nothing to do."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Answers as the interpreter does, but stops at the step that makes the environment.
STAND_IN = f'#!/bin/bash\n[[ $1 == -m ]] && {{ echo "venv by $0" >&2; exit 7; }}\nexec {sys.executable} "$@"\n'
# An environment whose pip has nothing to do, and whose imports succeed or fail.
INSTALLED = f'#!/bin/bash\n[[ $1 == -m ]] && exit 0\n[[ $1 == -W ]] && exit {{imports}}\nexec {sys.executable} "$@"\n'
SHIM = "#!/bin/bash\necho 'pyenv: command not found' >&2\nexit 127\n"
OLD = "#!/bin/bash\nexit 1\n"


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "repo" / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup_env.sh", tmp_path / "repo" / "scripts")
    shutil.copy(ROOT / "setup.py", tmp_path / "repo")
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "rm", "flock"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def place(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)
    return path


def set_up(checkout, **variables):
    """Run the script on a machine that has nothing but what the test put into bin/ and the home directory."""
    environment = {"PATH": str(checkout / "bin"), "HOME": str(checkout / "home"), **variables}
    script = checkout / "repo" / "scripts" / "setup_env.sh"
    return subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, timeout=60)


def test_without_python_one_sentence_says_what_to_install(checkout):
    result = set_up(checkout)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and "install one" in result.stderr


def test_shims_and_old_versions_are_passed_over(checkout):
    place(checkout / "bin" / "python3.12", SHIM)
    place(checkout / "bin" / "python3", OLD)
    found = place(checkout / "home" / ".pyenv" / "versions" / "3.13.0" / "bin" / "python", STAND_IN)
    result = set_up(checkout)
    assert f"venv by {found}" in result.stderr


def test_plain_python3_that_is_new_enough(checkout):
    found = place(checkout / "bin" / "python3", STAND_IN)
    assert f"venv by {found}" in set_up(checkout).stderr


def test_uv_is_asked(checkout):
    found = place(checkout / "uv-store" / "python", STAND_IN)
    place(checkout / "bin" / "uv", f"#!/bin/bash\n[[ $* == *3.12* ]] && echo {found}\n")
    assert f"venv by {found}" in set_up(checkout).stderr


def test_variable_chooses_and_is_not_replaced_in_silence(checkout):
    place(checkout / "bin" / "python3.12", STAND_IN)
    chosen = place(checkout / "mine", STAND_IN)
    assert f"venv by {chosen}" in set_up(checkout, PYTHON=str(chosen)).stderr
    result = set_up(checkout, PYTHON="/no/such/python")
    assert result.returncode == 1 and "PYTHON=/no/such/python" in result.stderr and "venv by" not in result.stderr


def test_complete_environment_is_reused_until_its_recipe_changes(checkout):
    place(checkout / "repo" / ".venv" / "bin" / "python", INSTALLED.format(imports=0))
    first, second = set_up(checkout), set_up(checkout)
    assert first.returncode == 0 and "installing" in first.stderr
    assert (second.returncode, second.stderr) == (0, "")
    with (checkout / "repo" / "setup.py").open("a") as recipe:
        recipe.write("# a new dependency")
    assert "installing" in set_up(checkout).stderr


def test_environment_that_cannot_import_is_made_anew(checkout):
    place(checkout / "repo" / ".venv" / "bin" / "python", INSTALLED.format(imports=1))
    found = place(checkout / "bin" / "python3.12", STAND_IN)
    result = set_up(checkout)
    assert "damaged; making it anew" in result.stderr and f"venv by {found}" in result.stderr
    assert not (checkout / "repo" / ".venv").exists()
