# Every target works from a fresh clone: the first one that needs it makes .venv.
SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := protos/v1/types.proto protos/v1/cache.proto protos/v1/worker.proto

# What peers out there speak: the last release, else the last commit.
BREAKING_BASE ?= $(shell git describe --tags --abbrev=0 2>/dev/null || echo HEAD)

.PHONY: help setup run test check protos sim bench-core bench-gpu test-gpu up down
.DEFAULT_GOAL := help

help: ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.installed ## make .venv and install everything that the project needs

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); PyTorch is the large part"
	@$(BIN)/pip install --quiet --disable-pip-version-check 'torch==$(shell sed -n 's/^torch==//p' constraints.txt)' -c constraints.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[worker,cli,dev]' -c constraints.txt
	@touch $@

run: setup ## set up, then show every way a prefix is reused
	@$(BIN)/stemcache demo

up: setup ## start Redis, the cache service and two workers, and keep them running
	@$(BIN)/stemcache up

down: setup ## stop what `make up` started
	@$(BIN)/stemcache down

test: setup ## run all tests
	@$(BIN)/python -m pytest $(ARGS)

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

bench-core: setup ## time the manager; TRACE=path takes the public trace
	@$(BIN)/python -m benchmarks.bench_core $(if $(TRACE),--trace $(TRACE))

bench-gpu: setup ## time the kernels on a CUDA device
	@$(BIN)/python -m benchmarks.bench_gpu

test-gpu: setup ## run the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu $(ARGS)
