# Everything works from a bare Python 3.11 or newer: the first target that needs it makes .venv and installs into it.
SHELL := /bin/bash -eu -o pipefail
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
RUN := PATH="$(CURDIR)/$(BIN):$$PATH"

.PHONY: help demo serve test slow check bench faults
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "make %-8s %s\n", $$1, $$2}'

demo: $(READY) ## train and examine v43, v46 and v49 on this machine's CPU, then print the table
	@$(RUN) dvc repro evaluate@esi-v49
	@$(BIN)/python -m clinrl.series

serve: $(READY) ## start Prefect, MLflow and the scheduled flows on this machine; Ctrl-C ends them
	@$(RUN) python -m flows.serve --servers

test: $(READY) ## run the test suite
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

slow: $(READY) ## run the tests of whole flows and trainings that `make test` leaves out
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m 'slow and not faults' -n 2 --dist loadgroup --no-loadscope-reorder

check: $(READY) ## formatting, lint, types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: $(READY) ## measure time and memory; writes data/reports/bench.json
	@$(BIN)/python tests/bench/run.py

faults: $(READY) ## attack small projects: kills, files altered by hand, fuzzing, hostile inputs, races; about an hour
	@$(BIN)/python tests/faults/run.py

# uv installs in seconds what pip installs in minutes. It does not read pip's configuration, so an index and a folder
# of wheels that pip knows are passed on (that folder is where a CPU build of torch may lie). Where uv fails, pip does it,
# without the extra openenv: pip cannot leave out what uv is told to leave out in pyproject.toml.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("clinrl needs Python 3.11 or newer: make PYTHON=...")'
	@echo "installing into $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@links="$${PIP_FIND_LINKS:-$$($(BIN)/pip config get global.find-links 2>/dev/null || true)}"; \
	index="$${PIP_INDEX_URL:-$$($(BIN)/pip config get global.index-url 2>/dev/null || true)}"; \
	if [ -n "$$links" ]; then export UV_FIND_LINKS="$$(echo $$links | tr ' ' ',')"; fi; \
	if [ -n "$$index" ]; then export UV_DEFAULT_INDEX="$$index"; fi; \
	$(BIN)/pip install -q uv && $(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt -e ".[dev,openenv,reward-models]" \
	|| $(BIN)/pip install -q -c constraints.txt -e ".[dev,reward-models]"
	@touch $@
