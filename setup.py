"""Installation of `megatron_vp` and of the `megatron-vp` command."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "([^"]+)"', (here / "megatron_vp" / "__init__.py").read_text()).group(1)

setup(
    name="megatron_vp",
    version=version,
    description="Vocabulary parallelism and balanced pipeline schedules for NVIDIA's Megatron-Core",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_vp", "megatron_vp.*"]),
    # The paper's published figures: what the cost model's constants were fitted on.
    package_data={"megatron_vp.cost.paper": ["data/*.csv"]},
    entry_points={"console_scripts": ["megatron-vp = megatron_vp.cli.app:main"]},
    install_requires=[
        # What we plug into. Its `training` extra also brings torch, numpy, transformers (which loads the tokenizer
        # directories that `megatron-vp data` writes) and omegaconf (which reads the configuration files).
        "megatron-core[training]>=0.19,<0.20",
        # Megatron's torch_dist checkpoint writer imports it and does not declare it.
        "psutil",
        # Megatron's --tensorboard-dir: loss curves and timers.
        "tensorboard",
        # `megatron-vp data` trains byte-level BPE with it; transformers pins the range that it can read.
        "tokenizers",
        # The command line (from 0.29 on it raises exceptions of its own, not click's), its tables and progress bars.
        "typer>=0.29",
        "rich",
        # PNG and SVG of schedules and loss curves.
        "matplotlib",
    ],
    extras_require={
        "test": [
            "pytest",
            # Properties of schedules over random sizes and costs.
            "hypothesis",
            # Lint and format; scripts/test.sh runs both.
            "ruff",
        ],
    },
)
