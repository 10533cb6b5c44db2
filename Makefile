# Everything runs in .venv, which `make setup` or `make quickstart` makes; only Python 3.11 or 3.12
# is needed before.

VENV := .venv
# There once requirements.txt is installed, and once requirements-dev.txt, which includes it.
FOR_TRAINING := $(VENV)/installed-for-training
STAMP := $(VENV)/installed
BIN := $(VENV)/bin

# The first of these that is new enough; give PYTHON=... to choose another.
SUITABLE := import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for python in python3 python3.11 python3.12; do \
	$$python -c '$(SUITABLE)' >/dev/null 2>&1 && { echo $$python; break; }; done)

# Else every process that a test starts compiles this project's modules again.
unexport PYTHONDONTWRITEBYTECODE

# Processes that run tests side by side, for 2 cores; each test with ranks starts up to 8 more.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
STARTS_PROCESSES := ranks or process or gpu or root or browser or verify

.PHONY: help setup quickstart check test lint coverage verify mutants gpu files clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv and install the pinned requirements

# Says how much it installs, and installs the requirements of a file into .venv, which it makes if
# there is none. The sizes are those of requirements.txt.
define install
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 found: give make PYTHON=/path/to/python"; exit 1; }
	@echo "installing $(1) into $(VENV), mostly CUDA's libraries: 2.9 GB to download (4 minutes"
	@echo "at 100 Mbit/s), 5.7 GB on disk; with a CPU build of torch 0.4 and 1.7 GB; then minutes to unpack"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -r $(1) -c constraints.txt
endef

$(STAMP): requirements.txt requirements-dev.txt constraints.txt
	$(call install,requirements-dev.txt)
	@touch $(FOR_TRAINING) $@

$(FOR_TRAINING): requirements.txt constraints.txt
	$(call install,requirements.txt)
	@touch $@

quickstart: $(FOR_TRAINING)  ## train a small LLaMA on real text, from nothing to a sample of its own
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/quickstart.sh

LINT := $(BIN)/python -m ruff check && $(BIN)/python -m ruff format --check && exec $(BIN)/python -m mypy

# Runs tests beside style and types: mypy has one thread, which leaves the other cores idle.
define beside_lint
	@{ $(LINT); } & lint=$$!; trap "kill $$lint; exit 130" INT; $(1); tests=$$?; \
	wait $$lint || { echo "style or types fail: make lint shows how"; exit 1; }; exit $$tests
endef

check: WORKERS = 2  # each fills a core
check: setup  ## style, types and the quick tests: no process, at most a second each
	$(call beside_lint,$(PYTEST) -m "not (slow or $(STARTS_PROCESSES))" --most-seconds 1)

test: setup  ## style, types and all tests; names the 25 slowest
	$(call beside_lint,$(PYTEST) --durations 25)

lint: setup  ## style and types alone
	$(LINT)

coverage: setup  ## lines and branches that all tests run, ranks included
	rm -rf .coverage && mkdir .coverage
	$(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist worksteal
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --skip-covered --sort=cover

verify: WORKERS = 2  # with more, studies that start 16 ranks run into their limits of time
verify: setup  ## the studies that `make test` leaves out: TESTS=files CONTINUE=1 (if not yet passed)
	$(PYTEST) $(TESTS) -m verify --must-run=root,compiler --timeout 3600 \
		--outcomes=runs/verify.jsonl $(if $(CONTINUE),--continue)

mutants: setup  ## change the product in 200 places, one by one: does a test see it (hours)
	for stage in choose reach run table; do $(BIN)/python tools/bench/study_mutants.py $$stage || exit; done

# On a machine with GPUs: its own Python, whose torch fits its driver, not .venv with the pinned one.
GPU_PYTHON ?= $(if $(REHEARSE),$(BIN)/python,python3)

gpu: $(if $(REHEARSE),setup)  ## check and measure GPUs: PARTS=a,e GPUS=8 QUICK=1 OUT=folder REHEARSE=1
	$(GPU_PYTHON) tools/bench/check_gpu.py $(if $(PARTS),--parts $(PARTS)) $(if $(GPUS),--gpus $(GPUS)) \
		$(if $(OUT),--out $(OUT)) $(if $(QUICK),--quick $(QUICK)) $(if $(REHEARSE),--rehearse)

files:  ## every file of the product, with its first line
	@awk 'FNR == 1 { gsub(/"/, ""); printf "%-52s %s\n", FILENAME, $$0 }' \
		$$(git ls-files pretrain_llama.py 'paro/*.py' 'model/*.py' 'data/*.py' 'tools/*.py')

clean:  ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
