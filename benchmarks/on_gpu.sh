#!/usr/bin/env bash
# What to run first when one GPU is at hand for 15 minutes: the most important first, every step with a time limit of its
# own, every result in a file as soon as it is there. Needs PyTorch, Triton, the megatron-core wheel and pytest.
#
#     benchmarks/on_gpu.sh FOLDER [CALL|STEP...]
#     benchmarks/on_gpu.sh --limits
#
# Calls 1 and 2 are the first visit, and run without names. Their limits add up to 590 and 150 s. Where one command may
# last ten minutes, name one call at a time. Calls 3 and 4 are for later visits, 4 with Transformer Engine. `--limits`
# lists the seconds of every step and call, and runs nothing. If `nccl` fails, `streams` runs in the place of `replay`,
# and the last line says what to run next. A run that is cut off loses the step it was at. FOLDER gets three files, which
# grow with every call: summary.txt (the verdict of every command), log.txt (all output) and results.jsonl (one line per
# measurement). The exit status is 1 where a command failed. PYTHON says which Python (default: python3), SCALE by what to
# multiply the limits. Without a GPU, the same steps run at sizes that only show that they run.
set -uo pipefail
calls=("env kernels layer_short nccl one_gpu replay" "replay_v overlap blocking"
    "streams layer overlap_more candidates ranks" "engine shapes waits")
usage() {
    echo "usage: $0 FOLDER [CALL|STEP...], or $0 --limits; calls and their steps:" >&2
    for number in "${!calls[@]}"; do echo "  $((number + 1)): ${calls[number]}" >&2; done
    exit 2
}
cd "$(dirname "$0")/.." || exit 2
[ $# -ge 1 ] || usage
folder=$1
shift
[ $# -gt 0 ] || set -- 1 2
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
failed=0 status=0
# A command at its limit is interrupted: pytest then says what passed, and ends the ranks that it started. In the
# background a shell's commands ignore interrupts, where `env` does not put that right.
interruptible=(env --default-signal=INT)
"${interruptible[@]}" true 2>/dev/null || interruptible=(env)

say() { echo "$*" | tee -a "$folder/summary.txt"; }

# limited NAME SECONDS COMMAND...: what it says in log.txt, its end in summary.txt where it fails
limited() {
    local name=$1 seconds=$2 started=$SECONDS from
    shift 2
    limits=$((limits + seconds))
    [ -z "$listed" ] || return
    seconds=$((seconds * ${SCALE:-1}))
    echo "==== $name: $*" >>"$folder/log.txt"
    from=$(wc -l <"$folder/log.txt")
    timeout --signal=INT --kill-after=15 "$seconds" "${interruptible[@]}" "$@" >>"$folder/log.txt" 2>&1
    status=$?
    say "$name: status $status after $((SECONDS - started)) of $seconds s"
    # What tests left out, and how many there were: a step whose tests are all skipped shows nothing, with status 0.
    tail -n "+$((from + 1))" "$folder/log.txt" |
        grep -E '^(SKIPPED|=+ ([0-9]+ (passed|failed|skipped|errors?|deselected)|no tests ran))' |
        sed -E 's/^=+ (.*[^=]) =+$/\1/' | cut -c -200 | sed 's/^/    /' | tee -a "$folder/summary.txt"
    tail -n "+$((from + 1))" "$folder/log.txt" | grep '^verdict: ' | cut -c -300 | sed 's/^/    /' |
        tee -a "$folder/summary.txt"
    [ "$status" -eq 0 ] && return
    failed=1
    say "$(tail -n "+$((from + 1))" "$folder/log.txt" | tail -n 12 | cut -c -300 | sed 's/^/    /')"
}

limits=0
short=() whole=() unaligned=() half=() ways=() job=() job_v=() held=() device=cpu nccl=
if [ -n "$listed" ]; then
    :
elif timeout 120 "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    device=cuda nccl="one[nccl] or nccl-1f1b-vocab-2 or nccl-v-half-vocab-1"
    # The aims first. Every call goes through its shapes in order and writes each as soon as it is measured.
    short=(--tokens 4096 --hidden 4096 --rows "8192,32768" --rounds 10)
    whole=(--tokens "2048,4096" --hidden "3072,6144" --rows "8192,32768" --rounds 10)
    unaligned=(--tokens 4096 --hidden 4096 --rows "9536,9496" --rounds 10)
    half=(--tokens 4096 --hidden 4096 --rows 8192 --rounds 10 --dtype float16)
    job=(--models gpt_4b --methods "vocab-2,baseline" --vocab-sizes 262144 --ranks=-1 -- --iterations 1)
    job_v=(--models gpt_4b --methods "v-half vocab-1,v-half offload" --vocab-sizes 262144 --ranks 0)
    job_v+=(-- --iterations 1 --vocab-shards even)  # Offload changes which rows are balanced.
    held=(--blocks 4 --rounds 10)
elif nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    say "there is a GPU, and PyTorch does not find it:"
    say "$("$python" -c 'import torch; print(torch.__version__, torch.version.cuda); torch.cuda.init()' 2>&1 | tail -n 3)"
    exit 1
else
    say "no CUDA device: a rehearsal, whose times mean nothing"
    device=cpu nccl="one[gloo] or gloo-1f1b-vocab-2 or gloo-v-half-vocab-1"
    short=(--tokens 64 --hidden 32 --rows 48 --rounds 2)
    whole=("${short[@]}")
    unaligned=(--tokens 64 --hidden 32 --rows "48,47" --rounds 2)
    half=("${short[@]}" --dtype float16)
    ways=(--rounds 2)
    tiny=(-- --num-layers 8 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4)
    job=(--models gpt_4b --methods baseline --vocab-sizes 512 --sequence 32 --ranks=-1 "${tiny[@]}")
    tiny=(-- --num-layers 16 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4)
    job_v=(--models gpt_4b --methods "v-half offload" --vocab-sizes 512 --sequence 32 --ranks 0 "${tiny[@]}")
    held=(--blocks 4)
fi
tests=("$python" -m pytest -v --durations=15 --durations-min=1 -W ignore -rs -p no:cacheprovider)
several=()
if [ -z "$listed" ] && "$python" -c 'import xdist' 2>/dev/null; then several=(-n 8); fi
trained=("$python" benchmarks/one_gpu.py "${results[@]}" --seconds $((50 * ${SCALE:-1})))
replayed=("$python" benchmarks/replay_tables.py "${results[@]}")
next=2

step() {
    case $1 in
    env) limited env 20 bash -c "nvidia-smi; '$python' -m megatron_vp.cli.app env" ;;
    kernels)
        limited kernels 90 "${tests[@]}" "${several[@]}" tests/vocab/test_kernels.py \
            tests/mcore/test_attention.py::test_fused_attention_on_a_device
        ;;
    layer_short) limited layer_short 50 "$python" benchmarks/output_layer.py "${short[@]}" "${results[@]}" ;;
    nccl)
        limited nccl 90 "${tests[@]}" -k "$nccl" tests/gpu/test_nccl.py
        [ "$status" -eq 0 ] || next="replay overlap"
        ;;
    one_gpu) limited one_gpu 250 "${trained[@]}" ;;
    replay)
        if [ "$next" != 2 ]; then
            limited streams 90 "${tests[@]}" -x -k "$device and two" tests/gpu
        else
            limited replay 90 "${replayed[@]}" "${job[@]}"
        fi
        ;;
    replay_v) limited replay_v 60 "${replayed[@]}" "${job_v[@]}" ;;
    overlap)
        limited overlap 40 env CUDA_DEVICE_MAX_CONNECTIONS=8 "$python" benchmarks/overlap_tax.py \
            "${held[@]}" "${results[@]}"
        ;;
    blocking) limited blocking 50 env CUDA_LAUNCH_BLOCKING=1 "${trained[@]}" 1f1b-vocab-2 ;;
    layer) limited layer 110 "$python" benchmarks/output_layer.py "${whole[@]}" "${results[@]}" ;;
    # Kernels loaded at once: whether a first use of one in a schedule hangs is for the step `ranks` to show.
    streams) limited streams 140 env CUDA_MODULE_LOADING=EAGER "${tests[@]}" -x -k "$device and two" tests/gpu ;;
    overlap_more)
        for queues in 1 32; do
            limited "overlap_$queues" 60 env CUDA_DEVICE_MAX_CONNECTIONS=$queues \
                "$python" benchmarks/overlap_tax.py "${results[@]}"
        done
        ;;
    candidates) limited candidates 95 "$python" benchmarks/candidates.py "${ways[@]}" "${results[@]}" ;;
    # The cases of two ranks have run in `streams`.
    ranks)
        limited ranks 130 "${tests[@]}" -k "$device and (three or four) or same_bits or wait" tests/gpu/test_one_device.py
        ;;
    engine)
        limited engine 400 "${tests[@]}" -m "slow or not slow" tests/gpu/test_transformer_engine.py \
            tests/mcore/test_delayed_weights.py::test_transformer_engine_has_what_pass_w_relies_on
        ;;
    shapes)
        limited unaligned 60 "$python" benchmarks/output_layer.py "${unaligned[@]}" "${results[@]}"
        limited float16 50 "$python" benchmarks/output_layer.py "${half[@]}" "${results[@]}"
        ;;
    waits) limited waits 45 "$python" benchmarks/waits.py "${results[@]}" ;;
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
[[ " ${names[*]} " != *" one_gpu "* || " ${names[*]} " == *" blocking "* ]] || say "next: $0 FOLDER $next"
exit "$failed"
