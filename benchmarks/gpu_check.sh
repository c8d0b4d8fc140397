#!/bin/sh
# The CUDA path of the packed runtime on this machine's GPU: its tests, then T(n), graph against eager, and bandwidth
# reached, for models made on the spot (random weights, 1B and 8B shapes). Nothing is downloaded. A few minutes.
#
#   benchmarks/gpu_check.sh [PYTHON]     with $OUT set, gpu_check.json is written there
set -eu
cd "$(dirname "$0")/.."
python=${1:-python}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: this torch sees no CUDA device" >&2
    exit 1
fi
"$python" -m pytest -q -m gpu tests/test_packed_gpu.py -p no:cacheprovider
if [ -n "${OUT:-}" ]; then
    "$python" benchmarks/gpu_check.py --out "$OUT/gpu_check.json"
else
    "$python" benchmarks/gpu_check.py
fi
