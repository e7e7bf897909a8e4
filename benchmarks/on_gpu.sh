#!/usr/bin/env bash
# What to run first when a GPU is at hand for minutes: the most important first, every step with a time limit of its
# own, every result in a file as soon as it is there. Needs PyTorch, Triton, the megatron-core wheel and pytest.
#
#     benchmarks/on_gpu.sh FOLDER [STEP...]
#
# Without steps all of them, in this order: env kernels streams layer overlap ranks replay rest. A run that is cut off loses the
# step it was at; name the steps that are left to go on. PYTHON says which Python (default: python3). Without a GPU the
# same steps run at sizes that only show that they run.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
if [ $# -lt 1 ]; then
    echo "usage: $0 FOLDER [STEP...]; steps: env kernels streams layer overlap ranks replay rest" >&2
    exit 2
fi
folder=$1
shift
mkdir -p "$folder" || exit 2
folder=$(cd "$folder" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0

# limited NAME SECONDS COMMAND...: output in NAME.txt, one line in summary.txt
limited() {
    local name=$1 seconds=$2 started=$SECONDS status
    shift 2
    timeout --kill-after=10 "$seconds" "$@" >"$folder/$name.txt" 2>&1
    status=$?
    [ "$status" -eq 0 ] || failed=1
    echo "$name: status $status after $((SECONDS - started)) s" | tee -a "$folder/summary.txt"
}

if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    short=(--tokens 4096 --hidden 4096 --rows "8192,32768")
    whole=()
    jobs=(--models gpt_4b --methods "baseline,vocab-1,vocab-2" --vocab-sizes "32768,262144")
    rest=(--models "gpt_10b,gpt_21b")
else
    echo "no CUDA device: a rehearsal, whose times mean nothing" | tee "$folder/summary.txt"
    short=(--tokens 64 --hidden 32 --rows 48 --rounds 2)
    whole=("${short[@]}")
    tiny=(-- --num-layers 8 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4)
    jobs=(--models gpt_4b --methods baseline --vocab-sizes 512 --sequence 32 --ranks=-1 "${tiny[@]}")
    rest=("${jobs[@]}")
fi

step() {
    case $1 in
    env)
        { nvidia-smi || true; } >"$folder/nvidia-smi.txt" 2>&1
        limited env 60 "$python" -m megatron_vp.cli.app env
        ;;
    kernels) limited kernels 240 "$python" -m pytest -q -x -rs tests/vocab/test_kernels.py tests/mcore/test_attention.py ;;
    streams) limited streams 240 "$python" -m pytest -q -x -rs -k "cuda and 2-" tests/gpu ;;
    layer)
        limited layer_short 120 "$python" benchmarks/output_layer.py "${short[@]}" --output "$folder/layer.jsonl"
        limited layer 240 "$python" benchmarks/output_layer.py "${whole[@]}" --output "$folder/layer.jsonl"
        ;;
    overlap)
        for queues in 8 1 32; do
            limited "overlap_$queues" 90 env CUDA_DEVICE_MAX_CONNECTIONS=$queues \
                "$python" benchmarks/overlap_tax.py --output "$folder/overlap.jsonl"
        done
        ;;
    ranks) limited ranks 420 "$python" -m pytest -q -rs tests/gpu ;;
    replay) limited replay 540 "$python" benchmarks/replay_tables.py --output "$folder/replay.jsonl" "${jobs[@]}" ;;
    rest) limited rest 540 "$python" benchmarks/replay_tables.py --output "$folder/replay.jsonl" "${rest[@]}" ;;
    *)
        echo "unknown step $1; steps: env kernels streams layer overlap ranks replay rest" >&2
        exit 2
        ;;
    esac
}

[ $# -gt 0 ] || set -- env kernels streams layer overlap ranks replay rest
for name in "$@"; do
    step "$name"
done
exit "$failed"
