"""Lets `torchrun -m megatron_vp.pretrain` run the training script pretrain_gpt_vp.py without the repository."""

import runpy

from megatron_vp.jobs.shipped import TRAINING_SCRIPT

if __name__ == "__main__":
    runpy.run_path(str(TRAINING_SCRIPT), run_name="__main__")
