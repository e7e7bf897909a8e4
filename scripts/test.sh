#!/usr/bin/env bash
# Lint, format check and tests, in an environment that is made if needed. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup_env.sh
# Every test process is one rank of several on the same cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
.venv/bin/ruff check .
.venv/bin/ruff format --check .
if [[ $# -eq 0 ]]; then set -- tests; fi
exec .venv/bin/python -m pytest -q "$@"
