# `make demo` and `make test` need only Python 3.11 and make: the first run creates .venv and installs everything.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-all test-gpu-proofs fuzz soak lint format docs bench clean

demo: $(INSTALLED)
	$(BIN)/python -m longweave.tools.demo

# In two halves, side by side: many tests keep one core busy, not two. What is sensitive to time is in the second.
BESIDE := tests/gpu tests/kernels tests/linear tests/models tests/plan tests/softmax tests/tools tests/test_docs_site.py
test: lint
	@$(BIN)/python -m pytest $(BESIDE) > .venv/beside.log 2>&1 & beside=$$!; trap "kill $$beside" INT TERM; \
	$(BIN)/python -m pytest $(BESIDE:%=--ignore=%); rest=$$?; \
	wait $$beside; found=$$?; cat .venv/beside.log; exit $$((rest + found))

# Also what takes too long for every change: thousands of steps whose memory must not grow.
test-all: lint
	LONGWEAVE_FULL=1 $(BIN)/python -m pytest

# What can be shown of the CUDA side without a GPU, all of it.
test-gpu-proofs: $(INSTALLED)
	LONGWEAVE_FULL=1 $(BIN)/python -m pytest tests/gpu

# Random plans and tensor cases against one process; goes on where the last run of this seed ended. Not in CI.
fuzz: MINUTES ?= 120
fuzz: SEED ?= 0
fuzz: $(INSTALLED)
	$(BIN)/python tests/fuzz/fuzz.py --seed $(SEED) --minutes $(MINUTES) --plans 100000 --tensors 1000

# Two ranks train, are killed and resume, again and again: memory stays flat, losses are those of an undisturbed run.
soak: MINUTES ?= 30
soak: SEED ?= 0
soak: $(INSTALLED)
	$(BIN)/python tests/fuzz/soak.py --seed $(SEED) --minutes $(MINUTES)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation as a site; `python -m http.server -d site` shows it with its search.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site
	@echo "open site/index.html"

bench: $(INSTALLED)
	for what in plan host attention packed compare linear pool peers; do $(BIN)/longweave bench $$what || exit 1; done

# torch goes first and alone: a range in another package's requirements would otherwise choose a newer build. What runs
# on GPUs, and in tests without one, comes without its own requirements for the same reason. A triton that torch has
# brought stays. At the end torch must still be the one that was asked for.
PIP := $(BIN)/python -m pip install -q
PINNED = $$(grep -E '^($(1))==' constraints.txt)
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) $(call PINNED,torch)
	$(BIN)/python -c 'import triton' 2> /dev/null || $(PIP) --no-deps $(call PINNED,triton)
	$(PIP) --no-deps $(call PINNED,fla-core|flash-linear-attention|einops)
	$(PIP) $(call PINNED,torch) -e '.[dev]'
	$(BIN)/python -c 'import torch; print("torch==" + torch.__version__.split("+")[0])' | grep -qxFf - constraints.txt
	touch $@

clean:
	rm -rf .venv out site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
