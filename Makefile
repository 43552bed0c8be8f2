# Two commands do everything: `make run` and `make test`. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: setup run test integration lint lint-page bench clean

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

# With heavy packages that nothing else needs, in a folder of their own.
integration: .venv/integration/ready
	OMP_NUM_THREADS=1 PYTHONPATH=.venv/integration $(BIN)/pytest tests/integration $(ARGS)

.venv/integration/ready: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade --target .venv/integration wandb
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if command -v npm >/dev/null && node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null; then \
		$(MAKE) --no-print-directory lint-page; \
	else \
		echo "The report page's scripts were not checked: that takes Node 20 or newer, and npm."; \
	fi

# Only checking the page's scripts needs Node: Python builds the page, a browser runs it.
PAGE := tools/page
lint-page: $(PAGE)/node_modules/ready
	$(PAGE)/node_modules/.bin/eslint --config $(PAGE)/eslint.config.js speedrun/report/page/static
	$(PAGE)/node_modules/.bin/tsc --project $(PAGE)

# Done once; done again when the lock file changes.
$(PAGE)/node_modules/ready: $(PAGE)/package.json $(PAGE)/package-lock.json
	@npm ci --prefix $(PAGE) || \
		{ echo "The report page's scripts were not checked: npm ci failed in $(PAGE)."; exit 1; }
	touch $@

bench: setup
	$(BIN)/speedrun bench

clean:
	rm -rf .venv $(PAGE)/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find speedrun tests -name __pycache__ -type d -exec rm -rf {} +
