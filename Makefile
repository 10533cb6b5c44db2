# Everything runs in .venv, which `make setup` makes once; only Python 3.11 or 3.12 is needed before.

VENV := .venv
STAMP := $(VENV)/installed
BIN := $(VENV)/bin

# The first of these that is new enough; give PYTHON=... to choose another.
SUITABLE := import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for python in python3 python3.11 python3.12; do \
	$$python -c '$(SUITABLE)' >/dev/null 2>&1 && { echo $$python; break; }; done)

.PHONY: help setup quickstart test lint verify clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv and install the pinned requirements

$(STAMP): requirements.txt requirements-dev.txt constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 found: give make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -r requirements-dev.txt -c constraints.txt
	@touch $@

quickstart: setup  ## train a small LLaMA on real text, from nothing to a sample of its own
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/quickstart.sh

test: lint  ## every check: style, types, tests
	$(BIN)/python -m pytest

lint: setup  ## style and types alone
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

verify: setup  ## the long studies that `make test` leaves out
	$(BIN)/python -m pytest -m verify --timeout 3600

clean:  ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
