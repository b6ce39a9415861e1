# Every target does its own set-up from a bare checkout; the stamps in .venv make the second run quick.
#   make demo PYTHON=python3.12      another interpreter
#   make test ARGS="-k cancel -x"    more arguments for pytest
#   make test JOBS=0                 in one process, as pytest does by itself

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# A quarter of the time a test waits for another process, or for a time to pass: one more than there are cores keeps them all busy.
JOBS ?= $(shell $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)) + 1)')
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1
# The tests start hundreds of processes. Where bytecode is not to be written, each of them would compile all of it anew.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test test-long check docs bench figures trace mutants clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.usable  ## the main job on real input, verified, in under a minute; ARGS="--daemon" has a daemon keep the blocks
	$(BIN)/offload demo $(ARGS)

test: $(VENV)/.ready  ## the tests, without those marked long
	@# In a new checkout two processes compile the tests first; else each worker would compile all of them.
	@test -d tests/maru/__pycache__ \
	    || ls -d tests/*/ | xargs -P 2 -n 8 $(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not long" $(ARGS)

test-long: $(VENV)/.ready  ## all tests
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.ready  ## every static check, and the documentation and the wheel
	PYTHON=$(PYTHON) .ci/run --checks

docs: $(VENV)/.ready  ## the documentation, warnings as errors, into docs/_build/html
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

bench: $(VENV)/.usable  ## each figure beside its limit, of the benches for users and for developers
	$(BIN)/offload bench all $(ARGS)
	$(BIN)/maru bench all $(ARGS)
	$(BIN)/python -m tests.bench all $(ARGS)

figures: $(VENV)/.ready  ## how much there is to read, beside its budget; ARGS="--at REVISION" compares with a commit
	$(BIN)/python tests/support/code_figures.py $(ARGS)
	$(BIN)/python -m tests.support.budget
	$(BIN)/python -m tests.support.prose

trace: $(VENV)/.usable  ## write docs/path-of-a-block.md anew: the files and functions that an operation passes
	$(BIN)/python tests/support/path_of_a_block.py

mutants: $(VENV)/.ready  ## faults made on purpose, one at a time: does a test find each? ARGS="--at REVISION", "--only pages"
	$(BIN)/python tests/support/mutants.py $(ARGS)

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist docs/_build .coverage .coverage.* htmlcov .mypy_cache .ruff_cache .pytest_cache \
	    .hypothesis .import_linter_cache

# Where `ensurepip` is missing (Debian splits it off), the pip that runs outside fills the environment.
$(VENV)/.made:
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
	    && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@touch $@

# In a call of its own and first: the later calls find it satisfied and never choose another build of it.
$(VENV)/.torch: $(VENV)/.made
	$(PIP) torch==2.13.0
	@touch $@

$(VENV)/.usable: pyproject.toml $(VENV)/.torch
	$(PIP) --editable '.[all]'
	@touch $@

$(VENV)/.ready: pyproject.toml $(VENV)/.usable
	$(PIP) --editable '.[all,dev]'
	@touch $@
