#!/usr/bin/env bash
# docs.sh [FOLDER]: build the documentation site in FOLDER (default: site), without a network. Broken links and anchors
# are errors. PYTHON sets the interpreter, which needs the `docs` extra of pyproject.toml.
set -euo pipefail
output=$(realpath -m "${1:-site}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}
if [[ -z ${PYTHON:-} && -x .venv/bin/python ]]; then python=.venv/bin/python; fi
export PYTHONPATH=$PWD:$PWD/scripts:$PWD/benchmarks NO_MKDOCS_2_WARNING=1
exec "$python" -W ignore -m mkdocs build --strict --clean --site-dir "$output"
