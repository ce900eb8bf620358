# Six verbs. Each builds .venv by itself, once, from pyproject.toml and constraints.txt.
#
#   make demo    train a small language model, sharded over two CPU processes
#   make test    the whole test suite in two processes; `make test ARGS="-k layout"` runs a part of it,
#                `make test JOBS=8` runs it in more, and JOBS=0 in one, as a debugger wants it
#   make prove   the same tests with every combination of their parameters, where make test shows one, and each case
#   make check   format, lint, types, import arrows and line budgets, documentation: `make -k check` goes on
#                after a failure, and each part is a target (format, lint, types, shape, docs)
#   make bench   the side-by-side measurements in benchmarks/, a short version in under three minutes;
#                `make bench ARGS="step --world 4"` runs what it is told
#   make clean   remove what the others made
#
# Another interpreter:                  make PYTHON=python3.12 test

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := test

PYTHON ?= python3
ARGS ?=
JOBS ?= 2
BIN := .venv/bin
STAMP := .venv/.installed
# Files in the order that tests/conftest.py gives them. A test that ended its process is run again,
# and fails the run all the same.
IN_PROCESSES = --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 2

# One thread per process: ranks are the parallelism, and sums keep one order.
export OMP_NUM_THREADS ?= 1

# Each test process imports the same files: bytecode saves each of them seven seconds of compiling.
test prove: export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test prove check format lint types shape docs bench clean

demo: $(STAMP)
	$(BIN)/shardwise train recipes/demo.yaml --nproc 2 --restarts 1 --kill-rank 1@66

test: $(STAMP)
	$(BIN)/python -m pytest $(IN_PROCESSES) $(ARGS)

prove: $(STAMP)
	$(BIN)/python -m pytest $(IN_PROCESSES) --prove $(ARGS)

check: format lint types shape docs

format: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

shape: $(STAMP)
	$(BIN)/python -m pytest -q tests/test_surface.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf .venv site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("shardwise needs Python 3.11 or newer, and this is %d.%d. Try: make PYTHON=python3.12 ..." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "Building .venv, once: a minute or more, about 2 GB."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,data,hf,peft,bnb,trainer,tensorboard,s3,examples,test,docs,dev]'
	@touch $@
