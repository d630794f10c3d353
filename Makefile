# make install   .venv with all that tests, demo and benchmarks need
# make demo      trains a classifier on several replicas of this machine
# make test      what CI runs: lint, types, all tests
# make test-interop   the tests with TensorFlow, PyTorch, Grain, Keras, Hugging Face
# make quick     the tests to run all day
# make thorough  random tests with three times as many examples
# make bench     speed, side by side with hand-written JAX
# make kills     kills the demo 20 times and workers 50 times: nothing may change
# make soak      thousands of steps without waiting: nothing may hang
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INTEROP := .venv-interop
# One more than two cores: a third of the tests wait for processes more than they compute.
WORKERS ?= 3

.PHONY: install demo test test-interop quick thorough lint types bench kills soak clean

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
	$(BIN)/python -m pytest -n $(WORKERS) --ignore tests/interop
	$(MAKE) test-interop

# An environment of its own: the libraries are large, and nothing else may need them.
$(INTEROP)/.installed: pyproject.toml
	test -x $(INTEROP)/bin/python || $(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --quiet --upgrade pip
	$(INTEROP)/bin/python -m pip install --quiet --editable '.[interop]'
	touch $@

test-interop: $(INTEROP)/.installed
	$(INTEROP)/bin/python -m pytest -n 2 tests/interop

quick: install
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not slow' --ignore tests/interop

thorough: install
	MIRRAX_THOROUGH=1 $(BIN)/python -m pytest -n $(WORKERS) tests/property tests/cluster tests/train tests/workers

bench: install
	$(BIN)/python benchmarks/run.py

kills: install
	MIRRAX_KILLS=20 $(BIN)/python -m pytest tests/examples/test_demo.py -k killed --timeout 3000
	$(BIN)/python tests/cluster/kills.py --kills 50

soak: install
	$(BIN)/python benchmarks/soak.py

clean:
	rm -rf $(VENV) $(INTEROP) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
