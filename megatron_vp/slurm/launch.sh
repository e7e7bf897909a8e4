# shellcheck shell=bash
# Sourced by the batch files next to it: which Python, how many ranks, where they meet, how they are started.
# MEGATRON_VP_PYTHON names another interpreter than that of scripts/setup_env.sh. With MEGATRON_VP_CONTAINER_IMAGE (and
# MEGATRON_VP_CONTAINER_MOUNTS, FROM:TO,...) all that srun starts runs in that image, by the pyxis plug-in of SLURM.
# Modules are the submitting shell's affair, because sbatch passes its environment on.

# What ranks write and log holds their arguments: not for all users.
umask o=

shopt -s inherit_errexit # a function that fails inside of $(...) ends it

fail() {
    printf '%s: error: %s\n' "${SLURM_JOB_NAME:-$0}" "$*" >&2
    exit 2
}

# number NAME LEAST [DEFAULT]: the value of a variable from outside, which must be a whole number. Bash would run what
# stands in $(...) inside of a word that it calculates with, and would take 08 for a bad octal number.
number() {
    local value=${!1:-${3:-}}
    if [[ ! $value =~ ^[0-9]{1,10}$ ]] || ((10#$value < $2)); then
        fail "$1 is '${value//[^[:print:]]/?}' and should be a whole number of at least $2"
    fi
    echo $((10#$value))
}

[[ -n ${SLURM_JOB_ID:-} ]] || fail "this is a batch script: start it with sbatch"
# The batch script runs on the node, outside the image. The folder of the job is at the same place inside.
container=()
if [[ -n ${MEGATRON_VP_CONTAINER_IMAGE:-} ]]; then
    container=("--container-image=$MEGATRON_VP_CONTAINER_IMAGE" "--container-workdir=$PWD"
        "--container-mounts=$PWD:$PWD${MEGATRON_VP_CONTAINER_MOUNTS:+,$MEGATRON_VP_CONTAINER_MOUNTS}")
    python=${MEGATRON_VP_PYTHON:-python}
else
    python=${MEGATRON_VP_PYTHON:-.venv/bin/python}
    command -v "$python" >/dev/null || fail "no Python at $python: run scripts/setup_env.sh, or set MEGATRON_VP_PYTHON"
fi
readonly container python

# Tasks that the user asked for, else one a GPU. A cluster that does not manage its GPUs is asked through the driver.
count_ranks() {
    local gpus=0 tasks
    if [[ -n ${SLURM_GPUS_ON_NODE:-} ]]; then
        gpus=$(number SLURM_GPUS_ON_NODE 0)
    elif command -v nvidia-smi >/dev/null; then
        gpus=$(nvidia-smi --list-gpus | wc -l)
    fi
    if [[ -n ${SLURM_NTASKS_PER_NODE:-} ]]; then
        number SLURM_NTASKS_PER_NODE 1
    elif ((gpus > 0)); then
        echo "$gpus"
    elif [[ -n ${SLURM_NTASKS:-} ]]; then
        tasks=$(number SLURM_NTASKS 1)
        ((tasks % nodes_of_job == 0)) ||
            fail "$tasks tasks cannot be spread evenly over $nodes_of_job nodes: say --ntasks-per-node"
        echo $((tasks / nodes_of_job))
    else
        fail "$SLURMD_NODENAME has no GPU: say how many ranks a node shall run, with sbatch --ntasks-per-node"
    fi
}

nodes_of_job=$(number SLURM_JOB_NUM_NODES 1)
cpus_of_node=$(number SLURM_CPUS_ON_NODE 1)
job_number=$(number SLURM_JOB_ID 0)
ranks_per_node=$(count_ranks)
readonly nodes_of_job cpus_of_node job_number ranks_per_node ranks=$((ranks_per_node * nodes_of_job))
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Below the ports that the kernel gives to connections; jobs that share a node differ in their number.
export MASTER_ADDR=${nodes[0]} MASTER_PORT=$((15000 + job_number % 15000))
export PYTHONUNBUFFERED=1

# check ARGUMENT...: one process a node checks the node, the arguments and the inputs; nothing starts if one refuses.
check() {
    srun "${container[@]}" --ntasks="$nodes_of_job" --ntasks-per-node=1 \
        "$python" -m megatron_vp check --ranks "$ranks" --ranks-per-node "$ranks_per_node" "$@"
}

# A task of srun becomes a rank of torch.distributed: what torchrun would set, from what SLURM says. The addresses come
# from above. exec: the process that SLURM sends its signals to is the rank itself.
# shellcheck disable=SC2016 # the rank's shell expands it
readonly as_rank='export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
exec "$@"'

# train FOLDER MODULE ARGUMENT...: all ranks run a Python module, each with its log in FOLDER; the first that dies takes
# the others with it.
train() {
    local folder=$1 cpus=$((cpus_of_node / ranks_per_node))
    shift
    mkdir -p "$folder"
    # srun replaces %4t by the rank, and would replace other percent signs, too.
    srun "${container[@]}" --ntasks="$ranks" --ntasks-per-node="$ranks_per_node" \
        --cpus-per-task=$((cpus > 0 ? cpus : 1)) --kill-on-bad-exit=1 --output="${folder//%/%%}/rank_%4t.log" \
        bash -c "$as_rank" rank "$python" -m "$@"
}
