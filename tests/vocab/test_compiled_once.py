"""Test that later iterations launch only kernels that the first one compiled, with any number of rows; for 9.0."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TOKENS, HIDDEN, COLUMNS = 512, 256, 1024


def kernels(counts: list[int]) -> set[str]:
    """Hashes of the kernels of one iteration whose microbatches own so many rows on this rank."""
    from megatron_vp.vocab.kernels import rows
    from tests.vocab.compile_kernels import Shape, compiled_only, launch_all

    main_grad = torch.empty(COLUMNS, HIDDEN, device="meta")
    with compiled_only(90) as made:
        launch_all(Shape(torch.bfloat16, COLUMNS, HIDDEN), TOKENS)
        made[:] = [each for each in made if not each[0].startswith("_add_")]
        for count in counts:
            row = torch.empty(count, dtype=torch.int64, device="meta")
            source = torch.empty(count, HIDDEN, dtype=torch.bfloat16, device="meta")
            rows.add_rows_(main_grad, row, source, sorted_rows=True)
    return {kernel.hash for _, kernel in made}


def one_token() -> int:
    """How many kernels a microbatch of one token needs."""
    from tests.vocab.compile_kernels import Shape, compiled_only, launch_all

    with compiled_only(90) as made:
        launch_all(Shape(torch.bfloat16, COLUMNS, HIDDEN), 1)
    return len({kernel.hash for _, kernel in made})


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_no_later_iteration_compiles_a_kernel(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["new"] == 0 and found["first"] == found["one token"] == 6


if __name__ == "__main__":
    draw = random.Random(0)
    first = kernels([TOKENS // 8, 1, TOKENS - 7])
    later = set().union(*(kernels([draw.randint(0, TOKENS) for _ in range(8)]) for _ in range(64)))
    print(json.dumps({"first": len(first), "new": len(later - first), "one token": one_token()}))
