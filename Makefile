# `make train` and `make test` work on a bare clone: Python 3.11 to 3.13, make, a package index.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

.PHONY: setup train test test-all lint notebooks clean

setup: $(STAMP)

$(STAMP): requirements.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else f'colabtpu needs Python 3.11 to 3.13, this is {v[0]}.{v[1]}: make PYTHON=python3.12')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements/dev.txt -e .
	@touch $(STAMP)

train: setup
	$(BIN)/python -m colabtpu train

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest --ignore=tests/engine -m "not slow"
	ENGINE=tensorflow $(BIN)/pytest tests/engine -m "not slow"
	ENGINE=jax $(BIN)/pytest tests/engine -m "not slow"

notebooks: setup
	$(BIN)/jupyter lab notebooks

clean:
	rm -rf $(VENV)
