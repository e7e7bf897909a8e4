#!/usr/bin/env bash
# A task of srun becomes a rank of torch.distributed: what torchrun would set, from what SLURM says.
# MASTER_ADDR and MASTER_PORT are the same for all tasks and come from launch.sh.
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
# exec: the process that SLURM sends its signals to is the rank itself.
exec "$@"
