# Two commands do everything: `make run` and `make test`. Each sets up what it needs in .venv first.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS ?=
SECONDS ?= 60
SEED ?= 0

.PHONY: setup run test gpu integration fuzz docs pictures dist lint lint-page bench clean

setup: .venv/ready

# What running needs; done once, done again when its inputs change. Nothing is compiled to bytecode
# here, which would take as long as installing does: Python does it at the first import, and of a
# tenth of the files.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "speedrun needs Python 3.11 or newer")'
	@echo "installing what running needs into .venv, once"
	@$(PYTHON) -m venv .venv
	@$(PIP) --no-compile setuptools
	@$(PIP) --no-compile --no-build-isolation -e '.[serve]'
	@touch $@

# What tests need besides. They start many processes, also where the environment keeps Python from
# writing bytecode: here it is made for all of them. Some files of other packages are no Python 3.
.venv/ready-test: .venv/ready
	$(PIP) --no-compile --no-build-isolation -e '.[test]'
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	touch $@

.venv/ready-lint: .venv/ready
	$(PIP) --no-compile --no-build-isolation -e '.[lint]'
	touch $@

# The main job: train a small GPT on this machine's Python library, then let it write. It stops on
# the way, where its text reads like Python; its last lines say how to go on to the full length.
run: setup
	@$(BIN)/speedrun train best --track nano --stop-after 96 $(ARGS)

test: .venv/ready-test
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --ignore tests/integration $(ARGS)

# What needs a GPU, where there is one; all other tests are not shown it.
gpu: .venv/ready-test
	SPEEDRUN_GPU=1 $(BIN)/pytest -m gpu tests/integration $(ARGS)

# Tests that take both cores without asking for one alone.
SHARED := $(patsubst %,tests/integration/test_%.py,documented_commands foreign_optimizers error_rates rehearsal)

# With Triton beside torch, which all others do without.
TRITON := tests/integration/test_kernels.py

# Every command of the documents, and their site; heavy packages that nothing else needs, in folders of their own; exports and the server
# as others use them, in environments without this package; the kernels under sanitizers and as every compiler here builds
# them, for every CPU that runs here or is emulated.
integration: .venv/integration/ready .venv/triton/ready .venv/clean/ready .venv/peers/ready .venv/ready-docs
	OMP_NUM_THREADS=1 PYTHONPATH=.venv/integration $(BIN)/pytest -n 2 --dist worksteal \
		$(SHARED) $(ARGS)
	OMP_NUM_THREADS=1 PYTHONPATH=.venv/integration $(BIN)/pytest tests/integration \
		$(SHARED:%=--ignore %) --ignore $(TRITON) $(ARGS)
	OMP_NUM_THREADS=1 PYTHONPATH=.venv/triton $(BIN)/pytest $(TRITON) $(ARGS)
	OMP_NUM_THREADS=1 SPEEDRUN_ALL_BUILDS=1 $(BIN)/pytest -n 2 --dist worksteal tests/model \
		-k "clang or aarch64 or hot_loops" $(ARGS)

# Bad input by the thousand, for SECONDS (an hour: 3600), from SEED: verbs and the files they read, and requests.
# ARGS names targets, or cases to repeat.
fuzz: .venv/ready-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $(SEED) $(ARGS)

.venv/integration/ready: .venv/ready-test
	$(PIP) --upgrade --target .venv/integration wandb
	$(PIP) --upgrade --no-deps --target .venv/integration \
		muon-optimizer pytorch_optimizer schedulefree opt_einsum
	touch $@

# Triton beside a CPU build of torch: it compiles kernels for GPUs that are not here, and interprets them.
.venv/triton/ready: .venv/ready-test
	$(PIP) --upgrade --no-deps --target .venv/triton triton
	touch $@

# transformers and what it needs, and nothing of ours.
.venv/clean/ready: constraints.txt
	$(PYTHON) -m venv .venv/clean
	.venv/clean/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch transformers
	touch $@

# The same with lm-evaluation-harness and the openai client beside it; torch is there once.
.venv/peers/ready: .venv/clean/ready
	$(PYTHON) -m venv .venv/peers
	.venv/clean/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' > \
		"$$(.venv/peers/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/clean.pth"
	.venv/peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt 'lm_eval[hf]' openai
	touch $@

# The documentation as a site in site/, to be opened from there or served by `python -m http.server -d site`.
# Building needs no network; what builds it is installed once.
docs: .venv/ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

.venv/ready-docs: .venv/ready
	$(PIP) --no-compile --no-build-isolation -e '.[docs]'
	touch $@

# Into dist/: an sdist, a wheel for any machine, and one with kernels prebuilt for x86-64 Linux.
dist: .venv/ready
	@$(BIN)/python -m tools.packaging.make dist

# Every picture of README and docs, from the code and the committed results; the page of a race that is run for it
# takes minutes and Chromium. ARGS=--drawn makes all others, in seconds.
pictures: setup
	$(BIN)/python -m tools.pictures.make $(ARGS)

lint: .venv/ready-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if command -v npm >/dev/null && node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null; then \
		$(MAKE) --no-print-directory lint-page; \
	else \
		echo "The pages' scripts were not checked: that takes Node 20 or newer, and npm."; \
	fi

# Only checking the pages' scripts needs Node: Python builds or serves them, a browser runs them.
PAGE := tools/page
lint-page: $(PAGE)/node_modules/ready
	$(PAGE)/node_modules/.bin/eslint --config $(PAGE)/eslint.config.js speedrun/report/page/static speedrun/serve/page
	$(PAGE)/node_modules/.bin/tsc --project $(PAGE)

# Done once; done again when the lock file changes.
$(PAGE)/node_modules/ready: $(PAGE)/package.json $(PAGE)/package-lock.json
	@npm ci --prefix $(PAGE) || \
		{ echo "The pages' scripts were not checked: npm ci failed in $(PAGE)."; exit 1; }
	touch $@

bench: setup
	$(BIN)/speedrun bench

clean:
	rm -rf .venv $(PAGE)/node_modules build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find speedrun tests -name __pycache__ -type d -exec rm -rf {} +
