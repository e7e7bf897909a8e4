#!/usr/bin/env bash
# setup_env.sh [--latest] [--system-site-packages]: creates .venv in the repository and installs the project into it,
# with the versions of constraints.txt. If .venv is already complete, the script does nothing. --latest installs the
# newest versions that pyproject.toml allows, and upgrades them at every call. --system-site-packages is for containers
# that come with PyTorch: .venv then uses the container's packages, and PyTorch, Transformer Engine, Apex and their
# compiled dependencies are not changed. Later calls keep this choice until .venv is removed. PYTHON=/path/to/python
# sets the interpreter.
#
# On a machine with an NVIDIA GPU, the script also compiles Transformer Engine if it is missing. This needs nvcc.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv
readonly constraints=scripts/constraints.txt
# The file `own` marks an environment that this script has created, and `stamp` marks a complete one.
readonly own=$venv/.megatron_vp_own stamp=$venv/.megatron_vp_complete
# An activated .venv must not be used to recreate itself.
PATH=${PATH//"$PWD/$venv/bin:"/}

say() { printf 'setup: %s\n' "$*" >&2; }

latest=no shared=no
for option in "$@"; do
    case $option in
        --latest) latest=yes ;;
        --system-site-packages) shared=yes ;;
        *)
            say "'$option' is not an option: give --latest, --system-site-packages or nothing"
            exit 2
            ;;
    esac
done
shares() { [[ -f $venv/pyvenv.cfg && $(<"$venv/pyvenv.cfg") == *"include-system-site-packages = true"* ]]; }
readonly asked_to_share=$shared
if shares; then shared=yes; fi
if [[ $shared == yes && $latest == yes ]]; then
    say "--latest would change the container's own packages, which $venv shares (--system-site-packages):" \
        "leave out --latest, or remove $venv"
    exit 2
fi
readonly latest shared

# Tests a candidate by running it, because pyenv has shims even for versions that it refuses to start. Our
# dependencies have no wheels for free-threaded builds and other implementations. Debian's python3 may lack ensurepip.
suitable() {
    "$1" -c '
import ensurepip, sys, sysconfig, venv
fits = sys.version_info >= (3, 12) and sys.implementation.name == "cpython"
sys.exit(not fits or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' >/dev/null 2>&1 &&
        { [[ $shared == no ]] || "$1" -c 'import importlib.metadata as m; m.version("torch")' >/dev/null 2>&1; }
}

# Oldest version first, because it is the most likely to have prebuilt wheels of all dependencies.
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
    local candidate with_torch=''
    if [[ $shared == yes ]]; then with_torch=", and with PyTorch, which --system-site-packages shares"; fi
    if [[ -n ${PYTHON:-} ]]; then
        if suitable "$PYTHON"; then command -v "$PYTHON" && return; fi
        say "PYTHON=$PYTHON does not run as CPython 3.12 or newer with venv and ensurepip$with_torch; set it to" \
            "another interpreter, or unset it."
        return 1
    fi
    while read -r candidate; do
        if suitable "$candidate"; then command -v "$candidate" && return; fi
    done < <(candidates)
    if [[ $shared == yes ]]; then
        say "no CPython 3.12 or newer found that has venv and PyTorch: leave out --system-site-packages, or set" \
            "PYTHON=/path/to/python."
        return 1
    fi
    say "no CPython 3.12 or newer with venv found: install one ('uv python install 3.12', 'pyenv install 3.12'," \
        "or your system's python3.12 and python3.12-venv), or set PYTHON=/path/to/python."
    return 1
}

# Prints a hash of everything that .venv was created from; fails if its interpreter no longer runs.
fingerprint() {
    "$venv/bin/python" -c '
import hashlib, pathlib, sys
latest, constraints = sys.argv[1:]
recipes = [path for path in map(pathlib.Path, ("pyproject.toml", "setup.py", constraints)) if path.is_file()]
text = b"".join(path.read_bytes() for path in recipes) + f"{sys.version} {sys.prefix} {latest}".encode()
print(hashlib.sha256(text).hexdigest())' "$latest" "$constraints" 2>/dev/null
}

complete() { [[ -f $stamp ]] && [[ $(<"$stamp") == "$(fingerprint)" ]]; }

# If this script did not create .venv, rename .venv, so that nothing in it is removed or changed.
keep_what_is_not_ours() {
    local kept=$venv.kept number=1
    if [[ ! -e $venv && ! -L $venv ]] || [[ -e $own || -e $stamp ]]; then return; fi
    while [[ -e $kept || -L $kept ]]; do kept=$venv.kept-$((++number)); done
    mv -T "$venv" "$kept"
    say "$venv was not created by this script, so it is now called $kept (mv $kept $venv restores it)"
}

create() {
    local python
    python=$(find_python)
    say "creating $venv with $("$python" -V) ($python)"
    rm -rf "$venv"
    mkdir "$venv"
    : >"$own"
    local sees=()
    if [[ $shared == yes ]]; then sees=(--system-site-packages); fi
    "$python" -m venv "${sees[@]}" "$venv"
}

# Prints pip constraints for a shared environment: the versions of the container's compiled packages, and the tested
# versions of packages that the container lacks.
shared_constraints() {
    "$venv/bin/python" -c '
import importlib.metadata, pathlib, re, sys
compiled = r"torch|triton|transformer|apex$|flash|nvidia|cuda|cudnn|nvfuser|numpy$"
simple = lambda name: re.sub("[-_.]+", "-", name).lower()
here = {simple(each.name): each.version for each in importlib.metadata.distributions()}
for name, version in sorted(here.items()):
    if re.match(compiled, name) and name != "transformers":
        print(f"{name}=={version}")
for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
    if not line.startswith("#") and simple(line.partition("==")[0]) not in here:
        print(line)' "$constraints"
}

install() {
    say "installing the project and its dependencies (PyTorch is several GB; this takes minutes)"
    local versions=(--constraint "$constraints")
    if [[ $shared == yes ]]; then
        # The container sets PIP_CONSTRAINT for its own programs, which do not see the packages in .venv.
        unset PIP_CONSTRAINT
        shared_constraints >"$venv/shared_constraints.txt"
        versions=(--constraint "$venv/shared_constraints.txt")
    elif [[ $latest == yes ]]; then
        versions=(--upgrade --upgrade-strategy eager)
    fi
    # Of some 14,000 modules, Python compiles those that are imported, when they are first imported.
    "$venv/bin/python" -m pip install --no-compile --disable-pip-version-check "${versions[@]}" \
        --editable '.[test,docs]' >&2
}

# Transformer Engine provides Megatron's fast layers. Training also works without it, but is slower.
install_engine() {
    if [[ $shared == yes || $(nvidia-smi --list-gpus 2>/dev/null || true) != *GPU* ]]; then return; fi
    if "$venv/bin/python" -W ignore -c 'import transformer_engine.pytorch' >/dev/null 2>&1; then return; fi
    say "this machine has a GPU: compiling Transformer Engine (up to half an hour; Ctrl-C leaves .venv usable)"
    scripts/setup_transformer_engine.sh --build >&2 ||
        say "Transformer Engine was not installed (see above), so Megatron's local layers are used; try again with" \
            "scripts/setup_transformer_engine.sh --build"
}

# After an interrupted installation, pip may treat incomplete packages as complete.
works() { "$venv/bin/python" -W ignore -c 'import torch, megatron.core, megatron_vp, pytest' >/dev/null 2>&1; }

done_already() { [[ $latest == no ]] && { [[ $asked_to_share == no ]] || shares; } && complete; }
if done_already; then exit 0; fi
if command -v flock >/dev/null; then
    exec 9>.venv.lock
    flock -n 9 || { say "waiting for another set-up to finish"; flock 9; }
    if done_already; then exit 0; fi
fi
keep_what_is_not_ours
if [[ $asked_to_share == yes && -d $venv ]] && ! shares; then
    say "recreating $venv, because it does not see this machine's packages"
    rm -rf "$venv"
fi
if [[ -e $stamp ]]; then mv "$stamp" "$own"; fi
if ! { suitable "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then create; fi
install
if ! works; then
    say "$venv is damaged; recreating it"
    create
    install
    works || { say "the installation finished but PyTorch or Megatron cannot be imported; see the output above."; exit 1; }
fi
fingerprint >"$stamp.part"
mv "$stamp.part" "$stamp"
install_engine
say "$venv is ready"
