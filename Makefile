# Everything a developer runs. A fresh machine needs Python 3.11 or newer and make; the rest is installed into .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Extra arguments for the tests: make test ARGS="tests/policy -x"
ARGS ?=

.PHONY: help venv demo test check format test-faults test-bench test-engine bench bench-overhead bench-failover bench-soak bench-nginx lock clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

venv: $(STAMP)  ## Install the router and its development tools into .venv, under constraints.txt

# The stamp is the last thing written: an installation that stopped half-way starts anew. pip itself comes first,
# because the one in an older Python does not know dependency groups; hatchling comes before the project, so that
# nothing is built with a version that constraints.txt does not name.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "router needs Python 3.11 or newer, $(PYTHON) is %d.%d; say make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "installing into $(VENV) (about a minute the first time)"
	@rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pip
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable .
	@touch $@

demo: $(STAMP)  ## Run two simulated engines, a relay and the router, with a live table (no GPU needed)
	$(BIN)/router demo $(ARGS)

test: $(STAMP)  ## Run the tests that need no real engine (about two minutes)
	$(BIN)/python -m pytest --ignore=tests/engine --ignore=tests/faults --ignore=tests/bench $(ARGS)

check: $(STAMP)  ## Formatting, lint, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

format: $(STAMP)  ## Format the code and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-faults: $(STAMP)  ## Cancel, kill and lose things at every step, and look that all comes back
	$(BIN)/python -m pytest tests/faults $(ARGS)

test-bench: $(STAMP)  ## Run the tests of the bench scripts (they need a C compiler and nginx)
	$(BIN)/python -m pytest tests/bench $(ARGS)

test-engine: $(STAMP)  ## Run the tests against real vLLM servers on this machine's CPU (Linux, Python 3.11, 12 GiB)
	tests/engine/run.sh $(BIN)/python $(ARGS)

bench: $(STAMP)  ## Measure the demo stack: open-loop arrivals, latency percentiles for each class
	$(BIN)/router bench --mix chat:0.9,batch:0.1 $(ARGS)

bench-overhead: $(STAMP)  ## Measure what the router costs beside vllm-router and nginx (about two minutes)
	$(BIN)/python bench/overhead.py --profile $(ARGS)

bench-failover: $(STAMP)  ## Measure what clients see of an engine that fails, stalls or is gone, and of leaving
	$(BIN)/python bench/failover.py --peers $(ARGS)

bench-soak: $(STAMP)  ## Hold 1,000 streams for ten minutes beside long prompts; watch memory and stalls
	$(BIN)/python bench/soak_self.py --check $(ARGS)

bench-nginx: $(STAMP)  ## Look whether the first token passes a default nginx at once
	$(BIN)/python bench/nginx_first_token.py --check $(ARGS)

lock:  ## Resolve the newest versions that pyproject.toml allows and write constraints.txt
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(PYTHON) -m venv "$$fresh/venv"; \
	"$$fresh/venv/bin/python" -m pip install --quiet --upgrade pip; \
	"$$fresh/venv/bin/python" -m pip install --quiet --group dev .; \
	sed -n '/^#/p' constraints.txt > "$$fresh/lock"; \
	"$$fresh/venv/bin/python" -m pip freeze --all --exclude two-pool-router --exclude setuptools >> "$$fresh/lock"; \
	cp "$$fresh/lock" constraints.txt

clean:  ## Remove .venv and everything that tools have left in the tree
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .import_linter_cache .cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
