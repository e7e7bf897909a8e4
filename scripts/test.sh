#!/usr/bin/env bash
# Run the linter, format check, type checker and tests, in an environment that is created if needed. Without arguments,
# three pytest processes run in parallel: for tests under Megatron, for tests that mostly wait, and for all other tests.
# The output of the last two processes follows at the end. Arguments are passed to a single pytest process, except
# these options, which must come first:
#   --quick             tests for the edit-test loop, about a minute: schedules, cost model, configuration, the
#                       vocabulary layers against fp64, and one small run against plain Megatron
#   --megatron VERSION  test with this version of megatron-core, in a separate environment
#   --megatron PATH     test with a checkout of Megatron-LM, including NVIDIA's scripts in the checkout
#   --latest            install the newest versions of all packages instead of the tested ones
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv quick=no
case ${1:-} in
    --megatron)
        venv=$(scripts/setup_megatron.sh "${2:-}")
        if [[ -d $2 ]]; then MEGATRON_LM=$(realpath "$2") && export MEGATRON_LM; fi
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
# Many tests start several ranks, as processes that share the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
.venv/bin/ruff check .
.venv/bin/ruff format --check .

types() { .venv/bin/python -m mypy; }

tests() { "$venv/bin/python" -m pytest -q "$@"; }

# timed NAME COMMAND...: runs COMMAND and prints how long it took.
timed() {
    local name=$1 start=$SECONDS status=0
    shift
    "$@" || status=$?
    printf '%s took %d s\n' "$name" $((SECONDS - start))
    return "$status"
}

if [[ $quick == no && $# -gt 0 ]]; then
    types
    tests "$@"
    exit
fi

rank_tests=(tests/harness tests/mcore)
# Besides what mostly waits, files that would make the tests under Megatron the last to end.
waiting_tests=(
    tests/gpu
    tests/mcore/test_bad_numbers.py
    tests/mcore/test_checkpoints.py
    tests/mcore/test_faults.py
    tests/mcore/test_installed.py
    tests/mcore/test_save_faults.py
    tests/mcore/test_save_folder.py
    tests/runtime
    tests/slurm
)
quick_tests=(
    tests/test_architecture.py
    tests/test_docs.py
    tests/test_files.py
    tests/jobs/test_commands_take_a_job.py
    tests/jobs/test_job_config.py
    tests/jobs/test_yaml_files.py
    tests/schedule/test_pass_kinds.py
    tests/schedule/test_schedule_command.py
    tests/schedule/test_schedule_data.py
    tests/schedule/test_schedule_programs.py
    tests/trace/test_rank_files.py
    tests/cost/test_cost_pieces.py
    tests/cost/test_outside.py
    tests/cost/test_rank_memory.py
    tests/cost/test_vocab_kernels.py
    tests/vocab/test_embedding.py
    tests/vocab/test_output.py
)

# Each of these functions runs a separate pytest. The tests that wait are mostly idle: their ranks hang, stop or die.
runs_under_megatron() {
    if [[ $quick == yes ]]; then
        tests tests/mcore/test_parity.py -k "test_parity and 1f1b-2-vocab-2" "$@"
    else
        timed "the tests under Megatron" tests --durations=25 "${rank_tests[@]}" "${waiting_tests[@]/#/--ignore=}"
    fi
}

waiting() {
    if [[ $quick == yes ]]; then
        types
    else
        timed "the type checker" types || return
        timed "the tests that mostly wait" tests --durations=25 "${waiting_tests[@]}"
    fi
}

all_others() {
    if [[ $quick == yes ]]; then
        tests "${quick_tests[@]}" "$@"
    else
        timed "all other tests" tests --durations=25 tests \
            "${rank_tests[@]/#/--ignore=}" "${waiting_tests[@]/#/--ignore=}"
    fi
}

outputs=$(mktemp -d)
status=0
set -m # each background command gets its own process group, which can be killed as one and receives interrupts
waiting "$@" >"$outputs/1" 2>&1 &
waiting=$!
all_others "$@" >"$outputs/2" 2>&1 &
others=$!
set +m
trap 'exit 130' INT TERM
trap 'kill -- "-$waiting" "-$others" 2>/dev/null || true; rm -rf "$outputs"' EXIT
runs_under_megatron "$@" || status=$?
wait "$waiting" || status=$?
wait "$others" || status=$?
cat "$outputs"/*
exit "$status"
