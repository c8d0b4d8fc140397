# Two commands, nothing else to set up:
#   make demo   a real 135M model, decoded three ways, with a table (downloads about 100 MB once)
#   make test   the tests; no download beyond Python packages
# PYTHON names the interpreter the environment is made with, VENV where it goes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test install check clean

demo: $(VENV)/installed
	$(BIN)/specbench run --preset demo

test: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# What CI runs beside the tests.
check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

install: $(VENV)/installed

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("specbench needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 demo" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/installed-test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/installed

$(VENV)/installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/installed $(VENV)/installed-test

clean:
	rm -rf $(VENV) build dist *.egg-info
