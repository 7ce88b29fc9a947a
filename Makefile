# `make run` is the quickstart, `make test` the tests; both install what they need into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test lint budgets soak gpu clean

run: $(VENV)/installed
	$(BIN)/ttrain pipeline run full

test: $(VENV)/installed-test
	$(BIN)/python -m pytest

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy ttrain
	$(BIN)/python tests/budgets.py

# Records the statements of each package, but for one that is over its budget and has grown: that has to shrink again.
budgets: $(VENV)/installed-test
	$(BIN)/python tests/budgets.py --write

# Long proofs: two runs at once, signals, many kills at random points. CI runs the first of each
# file, with KILLS=3 SAMPLE=1, two files at a time: all of the shorter ones took it past its 90
# minutes.
KILLS ?= 100
SLOTS ?= 30
soak: $(VENV)/installed-test
	TTRAIN_SOAK_KILLS=$(KILLS) TTRAIN_SOAK_SLOTS=$(SLOTS) $(BIN)/python -m pytest -m "soak$(if $(SAMPLE), and not long)" $(if $(SAMPLE),--sample,-n 0 -s) -rs

# On one GPU: its tests, FLOP/s, packed rows, resuming, two recipes; NANOCHAT=PATH adds nanochat's loop.
gpu: $(VENV)/installed-test
	$(BIN)/python bench/gpu.py --markdown bench/gpu.md $(if $(NANOCHAT),--nanochat $(NANOCHAT)) $(ARGS)

$(VENV)/installed: pyproject.toml constraints.txt ttrain/train/native.c ttrain/train/native.h
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ttrain needs Python 3.11 or newer, but $(PYTHON) is older; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info ttrain/train/*.so
