#!/usr/bin/env bash
# Write everything that scripts generate in README, docs and package: some minutes. Then look at `git diff`.
#
#     scripts/regenerate.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=python
[ -x .venv/bin/python ] && python=.venv/bin/python
for name in known_options compatibility schedule_figures public_runs before_after; do
    echo "scripts/$name.py"
    PYTHONPATH=. "$python" "scripts/$name.py"
done
