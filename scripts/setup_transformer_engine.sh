#!/usr/bin/env bash
# setup_transformer_engine.sh [VERSION...]: unpacks the Python code of Transformer Engine (a wheel of 1 MB, without
# compiled code) into .transformer-engine-VERSION, for tests that run its layers on the CPU. The code is not installed
# into .venv, because Megatron would then use it. By default, the script unpacks the versions that the tests use.
#
# setup_transformer_engine.sh --build [VERSION]: compiles Transformer Engine for GPUs against the PyTorch in .venv, and
# installs it into .venv. This needs nvcc and the headers of cuDNN and NCCL. The default is the version with which
# Megatron is tested.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*" >&2; }

if [[ ${1:-} == --build ]]; then
    if ! command -v nvcc >/dev/null && [[ ! -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]]; then
        say "nvcc, which compiles Transformer Engine, was not found: install the CUDA toolkit or set CUDA_HOME"
        exit 2
    fi
    scripts/setup_env.sh
    cuda=$(.venv/bin/python -c 'import torch; print((torch.version.cuda or "").partition(".")[0])')
    if [[ -z $cuda ]]; then
        say "the PyTorch in .venv is built without CUDA: install a PyTorch build with CUDA"
        exit 2
    fi
    .venv/bin/python -m pip install --disable-pip-version-check ninja pybind11 setuptools wheel
    # An isolated build would compile against the newest PyTorch instead of the installed one.
    exec .venv/bin/python -m pip install --disable-pip-version-check --no-build-isolation \
        "transformer-engine[pytorch,core_cu$cuda]==${2:-2.17.1}"
fi
if [[ $# -eq 0 ]]; then set -- 2.20.2 2.17.1; fi

scripts/setup_env.sh
for version in "$@"; do
    if [[ ! $version =~ ^[0-9]+\.[0-9]+[0-9a-z.]*$ ]]; then
        say "give versions of transformer-engine, such as 2.20.2"
        exit 2
    fi
    folder=.transformer-engine-$version
    if [[ -d $folder ]]; then continue; fi
    rm -rf "$folder.part"
    # All other dependencies are in .venv already, or are not needed by the layers.
    .venv/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --target "$folder.part" \
        "transformer-engine==$version" einops==0.8.2
    mv "$folder.part" "$folder"
    say "$folder is ready"
done
