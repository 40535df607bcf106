#!/usr/bin/env bash
# The scenes of benchmarks/conformance with SGLang's server on a CPU, in a virtual environment of its own: 5.7 GB, some
# minutes. SGLANG_PYTHON names a Python that has SGLang and this project's client already; PIP_ARGS says where else to
# install from; MODELS="full windows states" takes some of the models.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

FOLDER=build/engines/sglang
STUBS=build/engines/sglang-stubs
# What SGLang imports on a CPU. Its wheel asks for CUDA kernels besides, which have no use here.
NEEDS="orjson psutil pybase64 requests pydantic pyzmq msgspec soundfile transformers==5.19.0 fastapi uvicorn uvloop aiohttp
  ipython prometheus_client setproctitle sentencepiece einops compressed-tensors partial_json_parser interegular llguidance
  outlines==0.1.11 xgrammar==0.2.7 pillow python-multipart tqdm numpy scipy dill gguf openai sniffio"
python=${SGLANG_PYTHON:-$FOLDER/bin/python}
say() { printf '%s\n' "$*" >&2; }

install() { # WHAT PIP_ARGUMENTS...
  say "sglang: $1"; shift
  "$FOLDER/bin/python" -m pip install -q ${PIP_ARGS:-} "$@" >>"$FOLDER/install.log" 2>&1 || { tail "$FOLDER/install.log" >&2; exit 1; }
}

if [ -z "${SGLANG_PYTHON:-}" ] && [ ! -e $FOLDER/.made ]; then
  mkdir -p $FOLDER
  .venv/bin/python -m venv $FOLDER
  install "installing PyTorch: 5 GB, some minutes" torch==2.14.1 torchvision==0.29.1
  install "installing SGLang" --no-deps sglang==0.5.23
  # shellcheck disable=SC2086
  install "installing what it imports, and the host tier's client" $NEEDS 'grpcio>=1.81' 'protobuf>=6.33' 'xxhash>=3.5'
  touch $FOLDER/.made
fi
# Without kernels of its own SGLang asks vLLM for one of rotary embeddings, and goes without where there is none.
mkdir -p build/engines/models $STUBS/vllm
touch $STUBS/vllm/__init__.py
echo 'rotary_embedding = None' >$STUBS/vllm/_custom_ops.py
# shellcheck disable=SC2086
exec .venv/bin/python -m benchmarks.conformance.sglang "$python" build/engines/models "$PWD/$STUBS" ${MODELS:-}
