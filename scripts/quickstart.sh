#!/usr/bin/env bash
# From a fresh machine to a training run with and without vocabulary parallelism. Arguments go to quickstart.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup_env.sh
exec .venv/bin/python scripts/quickstart.py "$@"
