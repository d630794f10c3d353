# make install   .venv with all that tests, demo and benchmarks need
# make demo      trains a classifier on several replicas of this machine
# make test      what CI runs: lint, types, all tests
# make quick     the tests to run all day
# make bench     speed, side by side with hand-written JAX
# make soak      thousands of steps without waiting: nothing may hang
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: install demo test quick lint types bench soak clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("mirrax needs Python 3.11 or newer: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/python examples/demo.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/pyright

test: lint types
	$(BIN)/python -m pytest -n $(WORKERS)

quick: install
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not slow'

bench: install
	$(BIN)/python benchmarks/run.py

soak: install
	$(BIN)/python benchmarks/soak.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
