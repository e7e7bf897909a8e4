#!/usr/bin/env bash
# Makes .venv in the repository and installs the project into it; does nothing where that is done already.
# PYTHON=/path/to/python chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv
readonly stamp=$venv/.megatron_vp_complete
# An activated environment must not be asked to remake itself.
PATH=${PATH//"$PWD/$venv/bin:"/}

say() { printf 'setup: %s\n' "$*" >&2; }

# Runs the candidate, because a pyenv shim exists for versions that it then refuses to start. Free-threaded builds and
# other implementations have no wheels of our dependencies; Debian's python3 may come without ensurepip.
suitable() {
    "$1" -c '
import ensurepip, sys, sysconfig, venv
fits = sys.version_info >= (3, 12) and sys.implementation.name == "cpython"
sys.exit(not fits or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' >/dev/null 2>&1
}

# Oldest version first: prebuilt wheels of the dependencies exist for it the longest.
candidates() {
    local version root roots=("${PYENV_ROOT:-${HOME:-}/.pyenv}")
    if command -v pyenv >/dev/null; then roots+=("$(pyenv root 2>/dev/null || true)"); fi
    for version in 3.12 3.13 3.14; do
        echo "python$version"
        for root in "${roots[@]}"; do printf '%s\n' "$root/versions/$version".*/bin/python; done
        if command -v uv >/dev/null; then uv python find --system "$version" 2>/dev/null || true; fi
    done
    echo python3
    echo "${CONDA_PREFIX:-/nowhere}/bin/python"
    if command -v conda >/dev/null; then echo "$(conda info --base 2>/dev/null || true)/bin/python"; fi
}

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        if suitable "$PYTHON"; then command -v "$PYTHON" && return; fi
        say "PYTHON=$PYTHON does not run as CPython 3.12 or newer with venv and ensurepip; set another or unset it."
        return 1
    fi
    while read -r candidate; do
        if suitable "$candidate"; then command -v "$candidate" && return; fi
    done < <(candidates)
    say "no CPython 3.12 or newer with venv found: install one ('uv python install 3.12', 'pyenv install 3.12'," \
        "or your system's python3.12 and python3.12-venv), or set PYTHON=/path/to/python."
    return 1
}

# What a complete environment was made from; fails if its interpreter no longer runs.
fingerprint() {
    "$venv/bin/python" -c '
import hashlib, pathlib, sys
text = pathlib.Path("setup.py").read_bytes() + f"{sys.version} {sys.prefix}".encode()
print(hashlib.sha256(text).hexdigest())' 2>/dev/null
}

complete() { [[ -f $stamp ]] && [[ $(<"$stamp") == "$(fingerprint)" ]]; }

create() {
    local python
    python=$(find_python)
    say "making $venv with $("$python" -V) ($python)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
}

install() {
    say "installing the project and its dependencies (PyTorch is several GB; this takes minutes)"
    "$venv/bin/python" -m pip install --disable-pip-version-check --editable '.[test]' >&2
}

# An install that was interrupted can leave packages that pip believes to be whole.
works() { "$venv/bin/python" -W ignore -c 'import torch, megatron.core, megatron_vp, pytest' >/dev/null 2>&1; }

if complete; then exit 0; fi
if command -v flock >/dev/null; then
    exec 9>.venv.lock
    flock -n 9 || { say "waiting for another set-up to finish"; flock 9; }
    if complete; then exit 0; fi
fi
rm -f "$stamp"
if ! { suitable "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then create; fi
install
if ! works; then
    say "$venv is damaged; making it anew"
    create
    install
    works || { say "the installation finished but PyTorch or Megatron cannot be imported; see the output above."; exit 1; }
fi
fingerprint >"$stamp"
say "$venv is ready"
