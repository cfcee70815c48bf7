# Everything works on a fresh clone: a target first makes the virtual environment that it needs, and is quick when it is there.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt
RUN_DIR ?= runs/byte_lm
TEST_ARGS ?=

.PHONY: train test test-fast lint docs browser screenshots clean soak accounts matrix

## train: a byte-level language model on two processes, a few minutes; Ctrl-C saves, and the same again goes on
train: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/elastictrain run examples/byte_lm.py:ByteLM --nproc-per-node 2 --run-dir $(RUN_DIR) \
	    --max-steps 300 --global-batch-size 32 --micro-batch-size 16 --val-every 50 --checkpoint-every 50

## test: everything; the tests in a browser where there is one (make browser)
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 $(TEST_ARGS)

## test-fast: without the slow ones, under three minutes
test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 -m "not slow" $(TEST_ARGS)

## soak: nodes killed, stopped, leaving and joining at random; EVENTS=200 SEED=0
soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.soak --events $(or $(EVENTS),200) --seed $(or $(SEED),0)

## accounts: ten short runs with random faults; every node-second of them must have one cause
accounts: $(VENV)/.installed-dev
	$(BIN)/python -m tests.accounts --runs $(or $(RUNS),10) --seed $(or $(SEED),0)

## matrix: each mesh through each kind of change of nodes and workers, an hour or two; MESHES="tp 3d" WORKERS="1 2 mixed"
matrix: $(VENV)/.installed-dev
	$(BIN)/python -m tests.matrix $(if $(MESHES),--meshes $(MESHES)) $(if $(WORKERS),--workers $(WORKERS))

## lint: style, types, and the direction of imports
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

## docs: the pages of docs/, into site/
docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict --quiet

## browser: installs Chromium and its driver for tests/browser, where apt-get and root are there; else these tests are skipped
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	        chromium chromium-driver >/dev/null; } || echo "make: chromium cannot be installed: tests/browser is skipped" >&2; \
	else echo "make: no chromium, and no apt-get as root to install it: tests/browser is skipped" >&2; fi

## screenshots: the pictures of docs/images, from a run of a minute; fails without Chromium (make browser)
screenshots: $(VENV)/.installed-dev
	ELASTICTRAIN_REQUIRE_BROWSER=1 ELASTICTRAIN_SCREENSHOTS=docs/images $(BIN)/python -m pytest tests/browser

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# A stamp is older than what it was made from when that changes, and only then is anything installed again.
$(VENV)/.installed: pyproject.toml constraints.txt elastictrain/__init__.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "make: $$($(PYTHON) --version) is too old, elastictrain needs 3.11: make PYTHON=python3.11 …" >&2; exit 2; }
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable '.[dev]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) --editable '.[docs]'
	touch $@
