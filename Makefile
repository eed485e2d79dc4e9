# `make demo` and `make test` need only Python 3.11 and make: the first run creates .venv and installs everything.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-all test-gpu-proofs lint format bench clean

demo: $(INSTALLED)
	$(BIN)/python -m longweave.tools.demo

test: lint
	$(BIN)/python -m pytest

# Also what takes too long for every change: thousands of steps whose memory must not grow.
test-all: lint
	LONGWEAVE_FULL=1 $(BIN)/python -m pytest

# What can be shown of the CUDA side without a GPU, all of it.
test-gpu-proofs: $(INSTALLED)
	LONGWEAVE_FULL=1 $(BIN)/python -m pytest tests/gpu

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	for what in plan host attention packed compare linear; do $(BIN)/longweave bench $$what; done

# torch goes first and alone: a range in another package's requirements would otherwise choose a newer build.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
