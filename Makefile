# Everything works from a bare Python 3.11 or newer: the first target that needs it makes .venv and installs into it.
SHELL := /bin/bash -eu -o pipefail
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
PINS := constraints.txt
TORCH := constraints-torch.txt
CPU := constraints-torch-cpu.txt
# Else each process would compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE
RUN := PATH="$(CURDIR)/$(BIN):$$PATH"
DVC := python -m clinrl.runtime.dvc_command

.PHONY: help demo serve test long quick slow check docs site wheel bench gpu faults year lock bom vllm
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "make %-8s %s\n", $$1, $$2}'

demo: $(READY) ## train and examine v43, v46 and v49 on this machine's CPU, then print the table
	@$(RUN) CLINRL_STARTER=$$PPID python -m clinrl.runtime.forkserver bash -c '\
	  python -m clinrl check && exec $(DVC) --side-by-side --wait-for-lock repro --no-run-cache evaluate@esi-v49'
	@$(BIN)/python -m clinrl.pipeline.series esi

serve: $(READY) ## start Prefect, MLflow and the scheduled flows on this machine; Ctrl-C ends them
	@$(RUN) python -m flows serve --servers

# Tests write and remove a hundred thousand small files: in memory, where there are 4 GB of it for files.
ROOM := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 4000000 { print "TMPDIR=/dev/shm" }')
PYTEST := $(ROOM) OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder
QUICK := tests/tasks/test_contract.py $(wildcard tests/tasks/test_*_rules.py tests/tasks/test_*_rewards.py \
  tests/tasks/test_*_answer.py tests/tasks/test_*_triggers.py tests/tasks/test_*_metrics.py) \
  tests/config tests/analysis tests/test_intervals.py tests/test_layers.py

test: $(READY) ## run the test suite, without what takes long
	@$(BIN)/python -m clinrl check
	@$(PYTEST)

long: $(READY) ## run its tests of some seconds each: servers, processes, trainings, simulations
	@$(PYTEST) -m 'long and not slow and not faults and not bench and not gpu'

quick: $(READY) ## run its inner ring in a minute: tasks' contract, rules, rewards and parsers, params, statistics, layers
	@$(PYTEST) --hypothesis-profile=quick -k 'not hundred_thousand' $(QUICK)

slow: $(READY) ## run what both leave out: whole flows and trainings, kills and damage, more drawn examples
	@$(PYTEST) --hypothesis-profile=many -m 'slow or faults or hypothesis'

check: $(READY) ## formatting, lint, types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

docs: $(READY) ## write what the documentation takes from the code and the reports, and build its pages into site/
	@$(BIN)/python docs/generate.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open site/index.html"

site: $(READY) ## write everything as one folder of pages that open from a disk, build/site
	@$(BIN)/python -m clinrl site

SHIPPED := esi-v49 imaging-citations-1 audit-v3
wheel: $(READY) ## build the package with a version of each task in it, which `clinrl try` asks, into dist/
	@$(BIN)/python -m clinrl.pipeline.wheel $(SHIPPED)

bench: $(READY) ## measure time and memory, for an hour; writes data/reports/bench.json
	@$(BIN)/python tests/bench/run.py

gpu: $(READY) ## measure the full scale on a GPU, with random weights of the true shapes; writes data/reports/bench_gpu.json
	@$(BIN)/python tests/gpu/acceptance.py
	@$(BIN)/python -m pytest -m gpu tests/test_gpu.py

faults: $(READY) ## attack small projects: kills, files altered by hand, fuzzing, hostile inputs, races; about an hour
	@$(BIN)/python tests/faults/run.py

year: $(READY) ## live 52 simulated weeks of operation; YEAR="--weeks 4" fewer; writes data/reports/year.json
	@$(BIN)/python tests/year/year.py $(YEAR)

lock: $(READY) ## pin every library, its hashes and its licence anew; LOCK="--upgrade-package trl" takes a newer one
	@$(BIN)/python -m clinrl.provenance.pins $(LOCK)

bom: $(READY) ## write bom.cdx.json: the libraries, models and data sets that a release consists of
	@$(BIN)/python -m clinrl.provenance.bom

vllm: ## install .venv-vllm, in which stages run with vLLM on NVIDIA's GPUs
	@$(MAKE) --no-print-directory VENV=.venv-vllm PINS=constraints-vllm.txt TORCH= CPU= .venv-vllm/.installed

# Nothing is installed that has not its hash in PINS and TORCH or CPU: pip, which came with Python, installs uv and
# the build backend, and uv the rest in seconds. No dependency is resolved, since the files are complete. Where uv fails,
# pip does it. torch is the CPU build where its wheel can be found, else that of PyPI. uv does not read pip's
# configuration, so the indexes, the folder of wheels and the certificates that pip knows are passed on. A file may come
# from any of the indexes, since its hash is known. Python compiles a module when it is first imported: to compile all
# of them takes a minute.
$(READY): pyproject.toml $(PINS) $(TORCH) $(CPU)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("clinrl needs Python 3.11 or newer: make PYTHON=...")'
	@echo "installing into $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@setting() { \
	  if [ -n "$$2" ]; then echo "$$2"; return; fi; \
	  $(BIN)/pip config list | sed -nE "s/^global\\.$$1='(.*)'/\\1/p" | sed 's/\\n/ /g' | tail -n 1; \
	}; \
	pass() { if [ -n "$$2" ]; then export "$$1=$$2"; fi; }; \
	pass UV_FIND_LINKS "$$(setting find-links "$${PIP_FIND_LINKS:-}" | tr ' ' ',')"; \
	pass UV_DEFAULT_INDEX "$$(setting index-url "$${PIP_INDEX_URL:-}")"; \
	pass UV_INDEX "$$(setting extra-index-url "$${PIP_EXTRA_INDEX_URL:-}")"; \
	pass UV_INDEX_STRATEGY unsafe-best-match; \
	pass SSL_CERT_FILE "$$(setting cert "$${PIP_CERT:-}")"; \
	hashed="-q --no-deps --require-hashes"; \
	sed -nE '/^(setuptools|uv)==/,/[^\\]$$/p' $(PINS) > $(VENV)/first.txt; \
	$(BIN)/pip install $$hashed -r $(VENV)/first.txt; \
	install() { \
	  torch=$(TORCH); \
	  if [ -n "$(CPU)" ] && "$$@" $$hashed --dry-run -r $(CPU) >/dev/null 2>&1; then torch=$(CPU); fi; \
	  "$$@" $$hashed --no-build-isolation -r $(PINS) $${torch:+-r $$torch} && "$$@" -q --no-deps --no-build-isolation -e .; \
	}; \
	install $(BIN)/uv pip install --python $(BIN)/python || install $(BIN)/pip install
	@touch $@
