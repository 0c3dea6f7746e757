# Two commands: `make demo` and `make test`. Both set everything up; the second time they are quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STORE ?= stepscope-runs
# Tests that start ranks wait much of their time: two workers more than cores keep the cores busy.
WORKERS ?= $(shell expr $$(nproc) + 2)
PIP_FLAGS := --quiet --disable-pip-version-check

# Some virtual machines advertise AMX but trap on it; this keeps bfloat16 on the CPU to what they run.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
# What mypy knows of the libraries belongs to the environment that has them, and serves every checkout that uses it.
export MYPY_CACHE_DIR ?= $(VENV)/mypy-cache
# The checkout's own code, not another installation's.
unexport PYTHONPATH

# Tests start hundreds of interpreters, and each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench docs schemas services clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a minute or two the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The types of all libraries, which take 40 s of processor time to read, are read once per environment.
setup: $(STAMP) ## make .venv, install everything and prepare the type checker
	@$(BIN)/mypy >/dev/null || true

demo: $(STAMP) ## run the whole loop on this machine; ends with a report to open
	@$(BIN)/stepscope demo --store $(STORE)

services: # Slurm and Chromium for the tests that need them, where they may be installed
	@bash tools/setup_services.sh

LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# The type checker works beside the first tests, which mostly wait for ranks. One thread each: see docs/testing.md.
test: $(STAMP) services ## set up, run all tests, lint and type-check
	@{ $(LINT); } >$(VENV)/lint.log 2>&1 & linting=$$!; \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --durations=10 --cpu-files=25; tested=$$?; \
		wait $$linting; linted=$$?; cat $(VENV)/lint.log; exit $$((tested | linted))

lint: $(STAMP) ## ruff and mypy --strict
	@$(LINT)

bench: $(STAMP) ## run the benchmarks of Stepscope itself
	@for name in cli_startup measure_overhead self_comparison sweep_rate independent_clock ceilings tiny_preset comms_overhead; do \
		echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done

docs: $(STAMP) ## regenerate the generated pages and schemas, and build the site in build/site
	@$(BIN)/python tools/make_docs.py
	@$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs build/site
	@echo "site: build/site/index.html"

clean: ## remove what make made; runs are kept
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
