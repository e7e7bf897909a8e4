#!/usr/bin/env bash
# What to run first when a GPU is at hand for minutes: the most important first, every step with a time limit of its
# own, every result in a file as soon as it is there. Needs PyTorch, Triton, the megatron-core wheel and pytest.
#
#     benchmarks/on_gpu.sh FOLDER [CALL|STEP...]
#     benchmarks/on_gpu.sh --limits
#
# Where a call may last ten minutes, name one: `1`, `2`, `3`, the first visit, whose limits add up to 28 minutes; `4` is
# for a second visit, with Transformer Engine. `--limits` lists the seconds of every step and call, and runs nothing.
# Without names the first visit's steps run. A run that is cut off loses the step it was at; name the steps that are left
# to go on. FOLDER gets three files, which grow with every call: summary.txt (one line per command), log.txt (all output)
# and results.jsonl (one line per measurement). The exit status is 1 where a command failed. PYTHON says which Python
# (default: python3). Without a GPU the same steps run at sizes that only show that they run.
set -uo pipefail
calls=("waits nccl env kernels layer streams" "ranks replay" "overlap candidates rest" "engine shapes")
usage() {
    echo "usage: $0 FOLDER [CALL|STEP...], or $0 --limits; calls and their steps:" >&2
    for number in "${!calls[@]}"; do echo "  $((number + 1)): ${calls[number]}" >&2; done
    exit 2
}
cd "$(dirname "$0")/.." || exit 2
[ $# -ge 1 ] || usage
folder=$1
shift
[ $# -gt 0 ] || set -- 1 2 3
names=()
for name in "$@"; do
    if [[ $name == [1-4] ]]; then
        read -ra added <<<"${calls[name - 1]}"
        names+=("${added[@]}")
    elif [[ " ${calls[*]} " == *" $name "* ]]; then
        names+=("$name")
    else
        echo "unknown call or step $name" >&2
        usage
    fi
done
listed=
if [ "$folder" = --limits ]; then
    listed=yes
else
    mkdir -p "$folder" || exit 2
    folder=$(cd "$folder" && pwd)
fi
results=(--output "$folder/results.jsonl")
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
failed=0
# A command at its limit is interrupted: pytest then says what passed, and ends the ranks that it started. In the
# background a shell's commands ignore interrupts, where `env` does not put that right.
interruptible=(env --default-signal=INT)
"${interruptible[@]}" true 2>/dev/null || interruptible=(env)

say() { echo "$*" | tee -a "$folder/summary.txt"; }

# limited NAME SECONDS COMMAND...: what it says in log.txt, its end in summary.txt where it fails
limited() {
    local name=$1 seconds=$2 started=$SECONDS status from
    shift 2
    limits=$((limits + seconds))
    [ -z "$listed" ] || return
    echo "==== $name: $*" >>"$folder/log.txt"
    from=$(wc -l <"$folder/log.txt")
    timeout --signal=INT --kill-after=15 "$seconds" "${interruptible[@]}" "$@" >>"$folder/log.txt" 2>&1
    status=$?
    say "$name: status $status after $((SECONDS - started)) of $seconds s"
    # What tests left out, and how many there were: a step whose tests are all skipped shows nothing, with status 0.
    tail -n "+$((from + 1))" "$folder/log.txt" |
        grep -E '^(SKIPPED|=+ ([0-9]+ (passed|failed|skipped|errors?|deselected)|no tests ran))' |
        sed -E 's/^=+ (.*[^=]) =+$/\1/' | cut -c -200 | sed 's/^/    /' | tee -a "$folder/summary.txt"
    [ "$status" -eq 0 ] && return
    failed=1
    say "$(tail -n "+$((from + 1))" "$folder/log.txt" | tail -n 12 | cut -c -300 | sed 's/^/    /')"
}

limits=0
short=() whole=() unaligned=() half=() ways=() jobs=() job_1=() rest=() both_ends=() device=cpu nccl=
if [ -n "$listed" ]; then
    :
elif timeout 120 "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    device=cuda nccl="not gloo"
    # The aims first. Every call goes through its shapes in order and writes each as soon as it is measured.
    short=(--tokens "2048,4096" --hidden 4096 --rows "8192,32768")
    whole=(--tokens "2048,4096" --hidden "3072,6144" --rows "8192,32768" --rounds 10)
    unaligned=(--tokens 4096 --hidden 4096 --rows "9536,9496" --rounds 10)
    half=(--tokens 4096 --hidden 4096 --rows 8192 --rounds 10 --dtype float16)
    jobs=(--models gpt_4b --methods "vocab-2,baseline" --vocab-sizes 262144)
    job_1=(--models gpt_4b --methods vocab-1 --vocab-sizes 262144 --ranks=-1)
    rest=(--models gpt_21b --methods "baseline,vocab-2" --vocab-sizes 262144 --ranks=-1)
    both_ends=(--models gpt_7b --methods "v-half baseline,v-half vocab-1" --vocab-sizes 262144 --ranks 0)
elif nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    say "there is a GPU, and PyTorch does not find it:"
    say "$("$python" -c 'import torch; print(torch.__version__, torch.version.cuda); torch.cuda.init()' 2>&1 | tail -n 3)"
    exit 1
else
    say "no CUDA device: a rehearsal, whose times mean nothing"
    device=cpu nccl="world_of_one and gloo"
    short=(--tokens 64 --hidden 32 --rows 48 --rounds 2)
    whole=("${short[@]}")
    unaligned=(--tokens 64 --hidden 32 --rows "48,47" --rounds 2)
    half=("${short[@]}" --dtype float16)
    ways=(--rounds 2)
    tiny=(-- --num-layers 8 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4)
    jobs=(--models gpt_4b --methods baseline --vocab-sizes 512 --sequence 32 --ranks=-1 "${tiny[@]}")
    job_1=("${jobs[@]}") rest=("${jobs[@]}")
    both_ends=("${jobs[@]}")
fi
tests=("$python" -m pytest -v --durations=15 --durations-min=1 -W ignore -rs -p no:cacheprovider)

step() {
    case $1 in
    waits) limited waits 45 "$python" benchmarks/waits.py "${results[@]}" ;;
    nccl) limited nccl 50 "${tests[@]}" -k "$nccl" tests/gpu/test_nccl.py ;;
    env) limited env 30 bash -c "nvidia-smi; '$python' -m megatron_vp.cli.app env" ;;
    kernels)
        limited kernels 150 "${tests[@]}" tests/vocab/test_kernels.py tests/vocab/test_token_plan.py \
            tests/mcore/test_attention.py::test_fused_attention_on_a_device
        ;;
    layer)
        limited layer_short 50 "$python" benchmarks/output_layer.py "${short[@]}" "${results[@]}"
        limited layer 110 "$python" benchmarks/output_layer.py "${whole[@]}" "${results[@]}"
        ;;
    # Kernels loaded at once: whether a first use of one in a schedule hangs is for the step `ranks` to show.
    streams) limited streams 140 env CUDA_MODULE_LOADING=EAGER "${tests[@]}" -x -k "$device and two" tests/gpu ;;
    # The cases of two ranks have run in `streams`.
    ranks)
        limited ranks 200 "${tests[@]}" -k "$device and (three or four) or same_bits or wait" tests/gpu/test_one_device.py
        limited ranks_blocking 50 env CUDA_LAUNCH_BLOCKING=1 "${tests[@]}" -k "$device and two and 1f1b" \
            tests/gpu/test_one_device.py
        ;;
    replay)
        limited replay 240 "$python" benchmarks/replay_tables.py "${results[@]}" "${jobs[@]}"
        limited replay_1 60 "$python" benchmarks/replay_tables.py "${results[@]}" "${job_1[@]}"
        ;;
    overlap)
        for queues in 8 1 32; do
            limited "overlap_$queues" 60 env CUDA_DEVICE_MAX_CONNECTIONS=$queues \
                "$python" benchmarks/overlap_tax.py "${results[@]}"
        done
        ;;
    candidates) limited candidates 95 "$python" benchmarks/candidates.py "${ways[@]}" "${results[@]}" ;;
    rest)
        limited rest 140 "$python" benchmarks/replay_tables.py "${results[@]}" "${rest[@]}"
        limited rest_v 140 "$python" benchmarks/replay_tables.py "${results[@]}" "${both_ends[@]}"
        ;;
    engine)
        limited engine 480 "${tests[@]}" -m "slow or not slow" tests/gpu/test_transformer_engine.py \
            tests/mcore/test_delayed_weights.py::test_transformer_engine_has_what_pass_w_relies_on
        ;;
    shapes)
        limited unaligned 60 "$python" benchmarks/output_layer.py "${unaligned[@]}" "${results[@]}"
        limited float16 50 "$python" benchmarks/output_layer.py "${half[@]}" "${results[@]}"
        ;;
    esac
}

if [ -n "$listed" ]; then
    for number in "${!calls[@]}"; do
        whole_call=0
        for name in ${calls[number]}; do
            limits=0
            step "$name"
            echo "$name $limits"
            whole_call=$((whole_call + limits))
        done
        echo "call $((number + 1)): $whole_call"
    done
    exit
fi
for name in "${names[@]}"; do
    step "$name"
done
exit "$failed"
