#!/usr/bin/env bash
# Write everything that scripts generate in README, docs and package: some minutes, and with the pages' examples half an hour. Then look at `git diff`.
#
#     scripts/regenerate.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=python
[ -x .venv/bin/python ] && python=.venv/bin/python
for name in known_options schedule_figures before_after; do
    echo "scripts/$name.py"
    PYTHONPATH=. "$python" "scripts/$name.py"
done
echo "scripts/examples.py"
PYTHONPATH=. "$python" scripts/examples.py
