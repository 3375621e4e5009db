# `make train` and `make test` work on a bare clone: Python 3.11 to 3.13, make, a package index.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

.PHONY: setup train test test-all lint test-plain test-tensorflow test-jax \
	notebooks notebooks-tensorflow notebooks-jax clean

setup: $(STAMP)

$(STAMP): requirements.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else f'colabtpu needs Python 3.11 to 3.13, this is {v[0]}.{v[1]}: make PYTHON=python3.12')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements/dev.txt -e .
	@touch $(STAMP)

train: setup
	CT_ENGINE=$(or $(ENGINE),auto) $(BIN)/python -m colabtpu train

# What `test` runs, two at a time: the machine this was made for has two cores.
CHECKS = lint test-plain test-tensorflow test-jax notebooks-tensorflow notebooks-jax
FAST ?= not slow

test: setup
	@$(MAKE) --no-print-directory -j2 -k --output-sync=target $(CHECKS)

test-all: setup
	@$(MAKE) --no-print-directory test FAST="slow or not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-plain: setup
	$(BIN)/python -m pytest tests --ignore=tests/engine -m "$(FAST)"

test-tensorflow test-jax: test-%: setup
	ENGINE=$* $(BIN)/python -m pytest tests/engine -m "$(FAST)"

# The same notebooks as on Colab; the environment shrinks the work, never the code path.
notebooks-tensorflow notebooks-jax: notebooks-%: setup
	CT_ENGINE=$* CT_SIZE=tiny CT_RUN_DIR=$$(mktemp -d) \
	$(BIN)/python -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=900 \
	  --nbval-kernel-startup-timeout=300 notebooks

notebooks: setup
	$(BIN)/jupyter lab notebooks

clean:
	rm -rf $(VENV)
