#!/usr/bin/env bash
# Lint, format check and tests, in an environment that is made if needed. Arguments go to pytest, except for the first:
# `--megatron VERSION` runs the tests against that megatron-core, in an environment of its own; `--latest` installs the
# newest versions of everything instead of those that were tested together.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
if [[ ${1:-} == --megatron ]]; then
    scripts/setup_megatron.sh "${2:-}"
    venv=.venv-megatron-$2
    shift 2
elif [[ ${1:-} == --latest ]]; then
    scripts/setup_env.sh --latest
    shift
else
    scripts/setup_env.sh
fi
# Every test process is one rank of several on the same cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
.venv/bin/ruff check .
.venv/bin/ruff format --check .
if [[ $# -eq 0 ]]; then set -- tests; fi
exec "$venv/bin/python" -m pytest -q "$@"
