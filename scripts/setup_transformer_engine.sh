#!/usr/bin/env bash
# setup_transformer_engine.sh [VERSION...]: unpacks the Python of Transformer Engine (a wheel of 1 MB, without what it
# compiles) into .transformer-engine-VERSION, for tests that run its layers on the CPU. Nothing is installed: Megatron
# would find it. Without a VERSION it is the one that the tests run by default.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -eq 0 ]]; then set -- 2.20.2; fi

say() { printf 'setup: %s\n' "$*" >&2; }

scripts/setup_env.sh
for version in "$@"; do
    if [[ ! $version =~ ^[0-9]+\.[0-9]+[0-9a-z.]*$ ]]; then
        say "give versions of transformer-engine, such as 2.20.2"
        exit 2
    fi
    folder=.transformer-engine-$version
    if [[ -d $folder ]]; then continue; fi
    rm -rf "$folder.part"
    # Its other dependencies are the project's own, or not asked for by the layers.
    .venv/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --target "$folder.part" \
        "transformer-engine==$version" einops==0.8.2
    mv "$folder.part" "$folder"
    say "$folder is ready"
done
