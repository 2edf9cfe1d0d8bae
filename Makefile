# Everything works from a bare Python 3.11 or newer: the first target that needs it makes .venv and installs into it.
SHELL := /bin/bash -eu -o pipefail
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
RUN := PATH="$(CURDIR)/$(BIN):$$PATH"

.PHONY: help demo serve test slow check bench faults lock bom
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

faults: $(READY) ## kill the training of the real series, and the flows, at ten moments each; takes half an hour
	@$(BIN)/python -m pytest -m faults -o addopts='' -s tests/faults

lock: $(READY) ## pin every library, its hashes and its licence anew; LOCK="--upgrade-package trl" takes a newer one
	@$(BIN)/python -m clinrl.pins $(LOCK)

bom: $(READY) ## write bom.cdx.json: the libraries, models and data sets that a release consists of
	@$(BIN)/python -m clinrl.bom

# Nothing is installed that has not the hash in constraints.txt: pip, which came with Python, installs uv and the build
# backend, and uv the rest in seconds. No dependency is resolved, since the file is complete; pip does it where uv fails.
# uv does not read pip's configuration, so an index and a folder of wheels that pip knows are passed on (that folder is
# where a CPU build of torch may lie; the other one needs CUDA's libraries on Linux).
$(READY): pyproject.toml constraints.txt constraints-cuda.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("clinrl needs Python 3.11 or newer: make PYTHON=...")'
	@echo "installing into $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@links="$${PIP_FIND_LINKS:-$$($(BIN)/pip config get global.find-links 2>/dev/null || true)}"; \
	index="$${PIP_INDEX_URL:-$$($(BIN)/pip config get global.index-url 2>/dev/null || true)}"; \
	if [ -n "$$links" ]; then export UV_FIND_LINKS="$$(echo $$links | tr ' ' ',')"; fi; \
	if [ -n "$$index" ]; then export UV_DEFAULT_INDEX="$$index"; fi; \
	sed -nE '/^(setuptools|uv)==/,/[^\\]$$/p' constraints.txt > $(VENV)/first.txt; \
	$(BIN)/pip install -q --no-deps --require-hashes -r $(VENV)/first.txt; \
	install() { \
	  "$$@" -q --no-deps --no-build-isolation --require-hashes -r constraints.txt && \
	  { $(BIN)/pip show torch | grep -q '^Version: .*+cpu' || "$$@" -q --no-deps --require-hashes -r constraints-cuda.txt; } && \
	  "$$@" -q --no-deps --no-build-isolation -e .; \
	}; \
	install $(BIN)/uv pip install --python $(BIN)/python || install $(BIN)/pip install
	@touch $@
