#!/usr/bin/env bash
# setup_megatron.sh VERSION|PATH: creates an environment with another megatron-core on top of .venv, and prints the
# environment's folder: .venv-megatron-VERSION for a release, or .venv-megatron-NAME-COMMIT for the current state of the
# Megatron-LM checkout at PATH. The checkout is copied and not changed. Packages of .venv whose versions this
# megatron-core accepts, such as PyTorch, are shared and not installed again. Release series that the patches do not
# support are refused.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*" >&2; }

if [[ $# -eq 1 && -f $1/megatron/core/package_info.py ]]; then
    checkout=$(realpath "$1")
    commit=$(git -C "$checkout" rev-parse --short HEAD 2>/dev/null || echo files)
    version=$(sed -n 's/^\(MAJOR\|MINOR\|PATCH\) = \([0-9]*\).*/\2/p' "$1/megatron/core/package_info.py" | paste -sd.)
    venv=.venv-megatron-$(basename "$checkout")-$commit
elif [[ $# -eq 1 && $1 =~ ^[0-9]+\.[0-9]+[0-9a-z.]*$ ]]; then
    checkout='' version=$1 venv=.venv-megatron-$1
else
    say "give one version of megatron-core, such as 0.19.2, or the path of a checkout of Megatron-LM"
    exit 2
fi
readonly checkout version venv stamp=$venv/.megatron_vp_complete

scripts/setup_env.sh
.venv/bin/python - "$version" <<'END'
import sys

from megatron_vp.mcore.patches import SUPPORTED_SERIES

if ".".join(sys.argv[1].split(".")[:2]) not in SUPPORTED_SERIES:
    sys.exit(f"setup: megatron-core {sys.argv[1]} is not supported: use {' or '.join(SUPPORTED_SERIES)}")
END
# If the checkout has uncommitted changes, recreate its environment, because the name does not identify the changes.
changed=$([[ -z $checkout ]] || git -C "$checkout" status --porcelain 2>&1 | head -1)
if [[ -z $changed && -f $stamp ]] && cmp -s "$stamp" .venv/.megatron_vp_complete; then
    echo "$venv"
    exit 0
fi

say "creating $venv"
rm -rf "$venv"
.venv/bin/python -m venv "$venv"
base=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Add .venv as a site folder, so that its editable installs work. It comes last, so packages installed here take
# precedence.
"$venv/bin/python" - "$base" >"$own/base.pth" <<'END'
import sys

print(f"import site; site.addsitedir({sys.argv[1]!r})")
END
if [[ -n $checkout ]]; then
    source=$venv/megatron-core
    mkdir "$source"
    tar -C "$checkout" -cf - megatron pyproject.toml setup.py MANIFEST.in README.md LICENSE | tar -C "$source" -xf -
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps "./$source" >&2
    rm -rf "$source"
else
    "$venv/bin/python" -m pip install --disable-pip-version-check "megatron-core[training]==$version" >&2
fi
cp .venv/.megatron_vp_complete "$stamp"
say "$venv is ready"
echo "$venv"
