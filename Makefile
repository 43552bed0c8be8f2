# Two commands do everything: `make run` and `make test`. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: setup run test lint bench clean

setup: .venv/ready

# Done once; done again when its inputs change.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "speedrun needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev,hub,tensorboard]'
	touch .venv/ready

# The main job: train a small GPT on this machine's Python library, then let it write.
run: setup
	$(BIN)/speedrun train best --track nano $(ARGS)

test: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/speedrun bench

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find speedrun tests -name __pycache__ -type d -exec rm -rf {} +
