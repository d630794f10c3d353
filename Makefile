# make install   .venv with all that tests, demo and benchmarks need
# make demo      trains a classifier on several replicas of this machine
# make test      what CI runs: lint, types, all tests
# make test-interop   the tests with TensorFlow, PyTorch, Grain, Keras, Hugging Face
# make test-newest    a part of the tests with the newest JAX, if there is a Python for it
# make quick     the tests to run all day
# make thorough  random tests with three times as many examples, and all combinations and scenarios
# make bench     speed, side by side with hand-written JAX
# make bench-peers    whole training loops beside TensorFlow, PyTorch, Keras and Grain: benchmarks/PEERS.md
#                     (QUICK=1: in 4 minutes; RESUME=1: goes on where the last run was stopped)
# make kills     kills the demo 20 times and workers 150 times, strangers talk to a job: nothing may change
# make docs      the documentation as a site, in site/
# make soak      thousands of steps without waiting, half an hour with kills: nothing may hang or grow
# Hundreds of processes import the same files: they compile them once.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
INTEROP := .venv-interop
NEWEST := .venv-newest
DOCS := .venv-docs
PEERS := .venv-peers
NEWEST_PYTHON ?= $(shell .ci/newest-python)
NEWEST_INSTALLED := $(if $(NEWEST_PYTHON),$(NEWEST)/.installed)
# Without compiling all that is installed: much of it is never imported.
INSTALL := -m pip install --quiet --no-compile
# One more than two cores: a third of the tests wait for processes more than they compute.
WORKERS ?= 3

.PHONY: install demo test test-here lint-and-libraries test-interop test-newest quick thorough lint types docs bench bench-peers kills soak clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("mirrax needs Python 3.11 or newer: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/python examples/demo.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/pyright

# The tests, a third of which wait more than they compute, run beside lint, types and the largest
# environment; what they print is shown at once. Then the two small parts, side by side.
test:
	$(MAKE) -j 2 --output-sync install $(NEWEST_INSTALLED)
	$(MAKE) -j 2 --output-sync test-here lint-and-libraries
	$(MAKE) -j 2 --output-sync WORKERS=2 test-interop test-newest

test-here: install
	+$(PYTEST) -n $(WORKERS) --ignore tests/interop

lint-and-libraries: install
	$(MAKE) lint
	$(MAKE) types
	$(MAKE) $(INTEROP)/.installed

# An environment of its own: the libraries are large, and nothing else may need them.
$(INTEROP)/.installed: pyproject.toml | install
	test -x $(INTEROP)/bin/python || $(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python $(INSTALL) --editable '.[interop]'
	touch $@

test-interop: $(INTEROP)/.installed
	$(INTEROP)/bin/python -m pytest -n 2 tests/interop

# The newest JAX wants a newer Python than mirrax does.
$(NEWEST)/.installed: pyproject.toml
	test -x $(NEWEST)/bin/python || $(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python $(INSTALL) --upgrade --editable '.[suite]'
	touch $@

ifeq ($(NEWEST_PYTHON),)
test-newest:
	@echo 'Not tested with the newest JAX: there is no Python 3.12 or newer on PATH or in pyenv.'
else
test-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python -m pytest -n $(WORKERS) -m 'newest' --ignore tests/interop
endif

quick: install
	$(PYTEST) -n $(WORKERS) -m 'not slow' --ignore tests/interop

thorough: install
	MIRRAX_THOROUGH=1 $(PYTEST) -n $(WORKERS) tests/property tests/cluster tests/conformance tests/train tests/workers

# Without mirrax itself: what its docstrings say is read from the files.
$(DOCS)/.installed: pyproject.toml
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python $(INSTALL) $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo 'Read it with: python3 -m http.server --directory site'

bench: install
	$(BIN)/python benchmarks/run.py

# The peers on CPUs; this PyTorch comes without CUDA.
$(PEERS)/.installed:
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(INSTALL) tensorflow-cpu torch==2.13.0 keras grain 'jax>=0.10,<0.11'
	KERAS_BACKEND=jax $(PEERS)/bin/python -c 'import grain, keras, tensorflow, torch._dynamo'  # compiles them, out of the run's time
	touch $@

bench-peers: install $(PEERS)/.installed
	$(BIN)/python benchmarks/peers.py --python $(PEERS)/bin/python $(if $(QUICK),--quick) $(if $(RESUME),--resume)

kills: install
	MIRRAX_KILLS=20 $(PYTEST) tests/examples/test_demo.py -k killed --timeout 3000
	$(BIN)/python tests/cluster/kills.py --kills 50
	$(BIN)/python tests/cluster/kills.py --kills 100 --workers 4
	MIRRAX_THOROUGH=1 $(PYTEST) tests/cluster/test_fuzz.py

soak: install
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python tests/cluster/soak.py --minutes 30

clean:
	rm -rf $(VENV) $(INTEROP) $(NEWEST) $(DOCS) $(PEERS) site build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
