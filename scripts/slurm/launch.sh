# shellcheck shell=bash
# Sourced by the sbatch files in the repository: which Python, how many ranks, where they meet, how they are started.
# MEGATRON_VP_PYTHON names another interpreter than that of scripts/setup_env.sh; modules and containers are the
# submitting shell's affair, because sbatch passes its environment on.

fail() {
    printf '%s: error: %s\n' "${SLURM_JOB_NAME:-$0}" "$*" >&2
    exit 2
}

[[ -n ${SLURM_JOB_ID:-} ]] || fail "this is a batch script: start it with sbatch"
readonly python=${MEGATRON_VP_PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || fail "no Python at $python: run scripts/setup_env.sh, or set MEGATRON_VP_PYTHON"

# Tasks that the user asked for, else one a GPU. A cluster that does not manage its GPUs is asked through the driver.
count_ranks() {
    local gpus=${SLURM_GPUS_ON_NODE:-}
    if [[ -z $gpus ]] && command -v nvidia-smi >/dev/null; then gpus=$(nvidia-smi --list-gpus | wc -l); fi
    if [[ -n ${SLURM_NTASKS_PER_NODE:-} ]]; then
        echo "$SLURM_NTASKS_PER_NODE"
    elif ((${gpus:-0} > 0)); then
        echo "$gpus"
    elif [[ -n ${SLURM_NTASKS:-} ]]; then
        echo $((SLURM_NTASKS / SLURM_JOB_NUM_NODES))
    else
        fail "$SLURMD_NODENAME has no GPU: say how many ranks a node shall run, with sbatch --ntasks-per-node"
    fi
}

ranks_per_node=$(count_ranks)
readonly ranks_per_node ranks=$((ranks_per_node * SLURM_JOB_NUM_NODES))
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Below the ports that the kernel gives to connections; jobs that share a node differ in their number.
export MASTER_ADDR=${nodes[0]} MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000))
export PYTHONUNBUFFERED=1

# check ARGUMENT...: one process a node checks the node, the arguments and the inputs; nothing starts if one refuses.
check() {
    srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        "$python" -m megatron_vp.cli.app check --ranks "$ranks" --ranks-per-node "$ranks_per_node" "$@"
}

# train FOLDER ARGUMENT...: all ranks, each with its log in FOLDER; the first that dies takes the others with it.
train() {
    local folder=$1 cpus=$((SLURM_CPUS_ON_NODE / ranks_per_node))
    shift
    mkdir -p "$folder"
    srun --ntasks="$ranks" --ntasks-per-node="$ranks_per_node" --cpus-per-task=$((cpus > 0 ? cpus : 1)) \
        --kill-on-bad-exit=1 --output="$folder/rank_%4t.log" \
        scripts/slurm/rank.sh "$python" pretrain_gpt_vp.py "$@"
}
