# train, test and check make .venv when it is missing, and install again only when the pins change.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

.DELETE_ON_ERROR:
.PHONY: help train test test-all study bench check constraints clean

help:  ## show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo "  PYTHON=python3.12 chooses the interpreter, ARGS=\"...\" adds arguments to train and test."

train: $(READY)  ## pretrain a BERT on Python's own documentation
	$(BIN)/regard train bert $(ARGS)

# Each worker starts with a half of the tests, so that what a module prepares is prepared once.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal tests

test: $(READY)  ## run the tests, all but the slow ones
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(READY)  ## run every test, the slow ones too
	$(PYTEST) $(ARGS)

study: $(READY)  ## what attention buys: train with each alignment and without, about an hour
	$(BIN)/python docs/alignment_study.py $(ARGS)

bench: $(READY)  ## speed and memory beside stock models, ten minutes or more; best on an idle machine
	$(BIN)/python -m benchmarks $(ARGS)

# The checkout's layout is not the package's, so the types are checked where the package is installed whole, in a
# folder of its own. It is wiped first: a module since deleted must not be found there, nor in setuptools' build/lib.
check: $(READY)  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/python -m pip install --quiet --no-index --no-deps --no-build-isolation --target build/check .
	cd build/check && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p regard

# The file's present versions are kept where they still fit; ARGS=--upgrade takes the newest instead.
# torch's CUDA libraries are left out: torch itself pins the ones that its build needs, and builds differ.
# uv has an environment of its own, since pins that no longer fit would keep .venv from being made.
constraints:  ## derive constraints.txt from setup.cfg and constraints.in
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip install --quiet uv
	cp constraints.txt build/constraints.txt
	build/uv/bin/uv pip compile --quiet --no-python-downloads --universal --python-version 3.10 --extra test --extra dev \
		--strip-extras --no-header --annotation-style line --constraints constraints.in $(ARGS) \
		--output-file build/constraints.txt setup.cfg
	(echo "# Exact versions for Python 3.10 to 3.13, derived from setup.cfg and constraints.in by: make constraints"; \
		grep -vE '^(cuda|nvidia|triton)' build/constraints.txt) > constraints.txt

clean:  ## remove .venv, builds and caches; your runs stay
	rm -rf .venv build regard.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): constraints.txt setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "regard needs Python 3.10 or later, but $(PYTHON) is: $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another interpreter, for example: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[test,dev]'
	@touch $@
