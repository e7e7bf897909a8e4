"""Test that every shell script passes shellcheck."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path.relative_to(ROOT)
    for folder, pattern in [("scripts", "*.sh"), ("scripts", "*.sbatch"), ("benchmarks", "*.sh"), (".ci", "run")]
    for path in (ROOT / folder).rglob(pattern)
)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck not found: apt-get install shellcheck")
@pytest.mark.parametrize("path", SCRIPTS, ids=str)
def test_shellcheck_has_nothing_to_say(path):
    done = subprocess.run(["shellcheck", "-x", path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
