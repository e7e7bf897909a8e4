#!/usr/bin/env bash
# On a node with eight GPUs: whether jobs start, end, compute plain Megatron's losses, and what they take. Five minutes
# for the step `losses`, fifteen for all.
#
#     benchmarks/on_node.sh FOLDER [STEP...]
#
# Prints one verdict per line and leaves FOLDER/send_this.tar.gz, the one file to send us. Arguments go to on_node.py,
# which lists the steps. PYTHON says which Python (default: .venv/bin/python where it is there, else python3).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec "$PYTHON" benchmarks/on_node.py "$@"
