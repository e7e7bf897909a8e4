#!/usr/bin/env bash
# From a fresh machine to a training run with and without vocabulary parallelism. A first `--latest` installs the newest
# versions of everything instead of those that were tested together; other arguments go to quickstart.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${1:-} == --latest ]]; then
    scripts/setup_env.sh --latest
    shift
else
    scripts/setup_env.sh
fi
exec .venv/bin/python scripts/quickstart.py "$@"
