#!/usr/bin/env bash
# Regenerate everything that scripts write into the README, the docs and the package. This takes half an hour, mostly
# for the command output on the pages. Check the result with `git diff`.
#
#     scripts/regenerate.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=python
[ -x .venv/bin/python ] && python=.venv/bin/python
for name in known_options lock_megatron schedule_figures before_after; do
    echo "scripts/$name.py"
    PYTHONPATH=. "$python" "scripts/$name.py"
done
echo "scripts/examples.py"
PYTHONPATH=. "$python" scripts/examples.py
