#!/usr/bin/env bash
# setup_megatron.sh VERSION: makes .venv-megatron-VERSION, an environment with another megatron-core on top of .venv.
# Whatever that release does not ask for in another version (PyTorch above all) is .venv's, and costs nothing. Releases
# that the patches are not made for are refused.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*" >&2; }

if [[ $# -ne 1 || ! $1 =~ ^[0-9]+\.[0-9]+[0-9a-z.]*$ ]]; then
    say "give one version of megatron-core, such as 0.19.2"
    exit 2
fi
readonly version=$1 venv=.venv-megatron-$1
readonly stamp=$venv/.megatron_vp_complete

scripts/setup_env.sh
.venv/bin/python - "$version" <<'END'
import sys

from megatron_vp.mcore.start.launch import one_line_errors
from megatron_vp.mcore.patches import require_supported

with one_line_errors():
    require_supported(sys.argv[1])
END
if [[ -f $stamp ]] && cmp -s "$stamp" .venv/.megatron_vp_complete; then exit 0; fi

say "making $venv"
rm -rf "$venv"
.venv/bin/python -m venv "$venv"
base=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# As a site folder, so that editable installs in it count; after the own one, so that what is installed here wins.
"$venv/bin/python" - "$base" >"$own/base.pth" <<'END'
import sys

print(f"import site; site.addsitedir({sys.argv[1]!r})")
END
"$venv/bin/python" -m pip install --disable-pip-version-check "megatron-core[training]==$version" >&2
cp .venv/.megatron_vp_complete "$stamp"
say "$venv is ready"
