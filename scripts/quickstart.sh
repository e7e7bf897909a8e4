#!/usr/bin/env bash
# Set up an environment, then train a small model with and without vocabulary parallelism. If the first argument is
# `--latest`, install the newest versions of all packages instead of the tested ones. All other arguments are
# passed to quickstart.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${1:-} == --latest ]]; then
    scripts/setup_env.sh --latest
    shift
else
    scripts/setup_env.sh
fi
exec .venv/bin/python scripts/quickstart.py "$@"
