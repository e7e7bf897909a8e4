#!/usr/bin/env bash
# Lint, format check, types and tests, in an environment that is made if needed. Arguments go to pytest, except for the
# first:
#   --quick             what an inner loop needs, in a minute or so: schedules, cost model, configuration, the vocabulary
#                       layers against fp64, and one small run against plain Megatron
#   --megatron VERSION  run the tests against that megatron-core, in an environment of its own
#   --latest            install the newest versions of everything instead of those that were tested together
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv quick=no
case ${1:-} in
    --megatron)
        scripts/setup_megatron.sh "${2:-}"
        venv=.venv-megatron-$2
        shift 2
        ;;
    --latest)
        scripts/setup_env.sh --latest
        shift
        ;;
    --quick)
        scripts/setup_env.sh
        quick=yes
        shift
        ;;
    *) scripts/setup_env.sh ;;
esac
# Every test process is one rank of several on the same cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
.venv/bin/ruff check .
.venv/bin/ruff format --check .
if [[ $quick == no ]]; then
    .venv/bin/python -m mypy
    if [[ $# -eq 0 ]]; then set -- --durations=25 tests; fi
    exec "$venv/bin/python" -m pytest -q "$@"
fi

.venv/bin/python -m mypy &
types=$!
tests=(
    tests/test_architecture.py
    tests/test_docs.py
    tests/test_files.py
    tests/jobs/test_commands_take_a_job.py
    tests/jobs/test_job_config.py
    tests/jobs/test_yaml_files.py
    tests/schedule/test_pass_kinds.py
    tests/schedule/test_schedule_bounds.py
    tests/schedule/test_schedule_command.py
    tests/schedule/test_schedule_data.py
    tests/schedule/test_schedule_programs.py
    tests/schedule/test_stage_costs.py
    tests/trace/test_rank_files.py
    tests/cost/test_cost_pieces.py
    tests/cost/test_outside.py
    tests/cost/test_plan_command.py
    tests/cost/test_planner.py
    tests/cost/test_predict.py
    tests/cost/test_rank_memory.py
    tests/cost/test_traced_costs.py
    tests/cost/test_vocab_kernels.py
    tests/vocab/test_embedding.py
    tests/vocab/test_output.py
)
status=0
"$venv/bin/python" -m pytest -q "${tests[@]}" "$@" || status=$?
"$venv/bin/python" -m pytest -q tests/mcore/test_parity.py -k "test_parity and 1f1b-2-vocab-2" "$@" || status=$?
wait "$types" || status=$?
exit "$status"
