# Every target works from a fresh clone: the first one that needs it makes .venv.
SHELL := bash
BIN := .venv/bin
PROTOS := protos/v1/types.proto protos/v1/cache.proto protos/v1/host_tier.proto protos/v1/worker.proto

# What peers out there speak: the last release, else the last commit.
BREAKING_BASE ?= $(shell git describe --tags --abbrev=0 2>/dev/null || echo HEAD)

# An image may forbid Python to keep bytecode. Then each process of the tests would rewrite the asserts of all of them anew,
# for 8 s of CPU.
export PYTHONDONTWRITEBYTECODE :=

# Processes that `make test` runs in: one more than two cores, as tests of services wait for a third of their time.
# tests/conftest.py says which tests share one.
JOBS ?= 3

# The manager as images and wheels have it; Python finds it before the checkout's modules, which stay as they are.
COMPILED := build/compiled
WITH_COMPILED := PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(COMPILED):$(CURDIR) STEMCACHE_CORE=compiled

.PHONY: help setup run test check protos sim nightly compile test-compiled bench-core bench-cpu bench-families bench-gpu bench-serving test-gpu conformance-vllm conformance-sglang up down
.DEFAULT_GOAL := help

help: ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: ## make .venv and install everything that the project needs; PYTHON=python3.12 takes another Python than python3
	@PYTHON='$(PYTHON)' STEMCACHE_GOAL='$(firstword $(MAKECMDGOALS))' ./setup.sh

run: setup ## set up, then show every way a prefix is reused
	@$(BIN)/stemcache demo

up: setup ## start Redis, the cache service and two workers, and keep them running
	@$(BIN)/stemcache up

down: ## stop what `make up` started
	@test ! -x $(BIN)/stemcache || $(BIN)/stemcache down

test: setup ## run all tests in three processes; JOBS=5 for five
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder $(ARGS)

# mypy reads neither tests nor benchmarks: imports there that a rename broke are found by tests/architecture/test_names.py,
# in a few seconds and in functions too, where collecting the tests takes 24 and sees none of these.
check: setup ## format, lint, types, import contracts, stubs, proto lint
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint
	@$(BIN)/buf breaking --against '.git#ref=$(BREAKING_BASE)'
	@$(BIN)/python -m pytest -q tests/architecture

protos: setup ## generate the stubs anew
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. $(PROTOS)

sim: setup ## run the seeded simulation of the manager for longer than the tests do
	@$(BIN)/python -m tests.simulation $(ARGS)

nightly: setup ## the thorough run: the same, ten times as many examples of every property, and every case of kernels and families
	@$(BIN)/python -m tests.simulation $(ARGS)
	@STEMCACHE_HYPOTHESIS=thorough $(BIN)/python -m pytest -q --timeout 3600 -n $(JOBS) --dist loadgroup --no-loadscope-reorder \
		tests/core tests/cache_service tests/worker_service tests/register_qa tests/kernels tests/e2e tests/cli

# With a cache of mypy's of its own: .ci/run checks the types meanwhile.
compile: $(COMPILED)/.made ## compile the manager into build/compiled: a minute and a half, and a C compiler is needed

$(COMPILED)/.made: setup.py pyproject.toml constraints.txt $(shell find cache_service session -name '*.py' 2>/dev/null) | setup
	@rm -rf $(COMPILED) build/lib build/temp.*; mkdir -p $(COMPILED); echo 'compiling the manager: a minute and a half ...' >&2
	@MYPY_CACHE_DIR=build/mypy STEMCACHE_COMPILE=1 $(BIN)/python setup.py -q build --build-base build --build-lib build/lib >build/log 2>&1 || { tail build/log >&2; exit 1; }
	@mv build/lib/cache_service build/lib/stemcache__mypyc*.so $(COMPILED) && touch $@

test-compiled: compile ## run the manager's tests, and those of reuse over gRPC, with the compiled manager
	@$(WITH_COMPILED) $(BIN)/python -m pytest --import-mode=append -n $(JOBS) --dist loadgroup --no-loadscope-reorder \
		tests/core tests/simulation tests/cache_service tests/e2e/test_reuse.py tests/e2e/test_windows.py $(ARGS)

bench-core: compile ## time the manager, as Python and compiled, and measure its memory; TRACE=path takes the public trace
	@$(BIN)/python -m benchmarks.bench_core $(if $(TRACE),--trace $(TRACE))
	@$(WITH_COMPILED) $(BIN)/python -m benchmarks.bench_core $(if $(TRACE),--trace $(TRACE))
	@$(WITH_COMPILED) $(BIN)/python -m benchmarks.bench_memory

bench-cpu: setup ## serve the model in the box on one CPU thread, beside transformers' generate; ARGS="--rounds 2" is shorter
	@$(BIN)/python -m benchmarks.bench_cpu_worker $(ARGS)

bench-gpu: setup ## time the kernels on a CUDA device
	@$(BIN)/python -m benchmarks.bench_gpu

bench-families: setup ## time what a hit saves each family of models, on a CUDA device; ARGS="--device cpu --quick --out F" tries it
	@$(BIN)/python -m benchmarks.bench_families $(or $(ARGS),--out benchmarks/results/families.json)

bench-serving: setup ## time what clients of an 8B-shaped model on a CUDA device see; ARGS="--device cpu --quick" tries it here
	@$(BIN)/python -m benchmarks.bench_serving $(ARGS)

conformance-vllm: setup ## prove the host tier under vLLM's CPU engine, installed into build/engines (3.5 GB); VLLM_PYTHON takes another one
	@benchmarks/conformance/vllm.sh

conformance-sglang: setup ## the same under SGLang's server on a CPU, installed into build/engines (5.7 GB); SGLANG_PYTHON takes another one
	@benchmarks/conformance/sglang.sh

test-gpu: setup ## run the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu $(ARGS)
