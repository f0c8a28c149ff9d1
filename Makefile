# `make demo` and `make test` do all the set-up; every other target is for who works on the code.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JUDGES ?= .venv-judges
MINDSPORE ?= .venv-mindspore
# A version manager puts a python3.12 on the path that only says it is not chosen.
JUDGES_PYTHON ?= $(shell for python in python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python3.12; do \
	$$python -c 'import venv' 2>/dev/null && echo $$python && break; done)
INSTALLED := $(VENV)/.installed
JOBS ?= 2

.DELETE_ON_ERROR:
.PHONY: help demo test slow docs fuzz judges judge-mindspore lint format types lock audit bench compatibility clean

help:
	@echo "make demo    set up, calibrate this machine, plan, run for real, write reports/out/demo.html"
	@echo "make test    set up and run the test suite"
	@echo "make slow    the tests that take more than a few seconds each"
	@echo "make judges  Megatron-LM, torchtitan, DeepSpeed and others judge exported files (Python 3.12, about 6 GB)"
	@echo "make docs    build the documentation as a site in build/site"
	@echo "make judge-mindspore  MindSpore loads strategy files and saves them again (Python 3.12, about 3 GB)"
	@echo "make fuzz    a million mutated inputs for every parser"
	@echo "make lint    ruff, lint and format"
	@echo "make types   mypy, strict"
	@echo "make lock    lock the versions of constraints.txt anew, with digests"
	@echo "make audit   known weaknesses of the locked packages (asks PyPI's advisories)"
	@echo "make bench   the benchmarks (pytest-benchmark)"
	@echo "make compatibility   the tests on the oldest and the newest torch, with every Python found"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# pip takes no digests of folders, so the project itself comes second, with what the lock has brought.
$(INSTALLED): pyproject.toml requirements.lock | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python -m reports.demo --out reports/out/demo.html

# Each test process computes on one core; threads of torch would wait for each other.
test: export OMP_NUM_THREADS ?= 1
test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(JOBS) --benchmark-disable

slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow -n $(JOBS) --benchmark-disable

$(JUDGES)/.installed: Makefile
	$(JUDGES_PYTHON) -m venv $(JUDGES)
	$(JUDGES)/bin/python -m pip install --quiet torch numpy transformers tensorboard datasets tyro accelerate==1.15.0
	DS_BUILD_OPS=0 $(JUDGES)/bin/python -m pip install --quiet deepspeed==0.19.8
	$(JUDGES)/bin/python -m pip install --quiet --no-deps megatron-core==0.19.2 torchtitan==0.3.0 spmd_types==0.2.3 nemo-automodel==0.7.0 \
		megatron-bridge==0.6.2 hydra-core==1.3.4 omegaconf==2.3.0 antlr4-python3-runtime==4.9.3
	$(JUDGES)/bin/python -m pip install --quiet --no-deps --target $(JUDGES)/torchtitan-0.2 torchtitan==0.2.2 torchtitan-npu==0.2.2.post2
	@touch $@

$(MINDSPORE)/.installed: Makefile
	$(JUDGES_PYTHON) -m venv $(MINDSPORE)
	$(MINDSPORE)/bin/python -m pip install --quiet mindspore==2.10.0
	@touch $@

ifeq ($(JUDGES_PYTHON),)
judges judge-mindspore:
	@echo "$@: no Python 3.12 was found, which the frameworks need; skipped (set JUDGES_PYTHON)"
else
judges: $(INSTALLED) $(JUDGES)/.installed
	MESHWRIGHT_JUDGES=$(abspath $(JUDGES))/bin/python $(BIN)/python -m pytest -m slow tests/judges/test_judges.py

judge-mindspore: $(INSTALLED) $(MINDSPORE)/.installed
	MESHWRIGHT_MINDSPORE=$(abspath $(MINDSPORE))/bin/python $(BIN)/python -m pytest -m slow tests/judges/test_mindspore.py
endif

docs: $(INSTALLED)
	$(BIN)/zensical build --strict

fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzzing

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED)
	$(BIN)/mypy

# uv and pip-audit have environments of their own: neither is needed to work on the code.
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet uv
	{ sed '/^[^#]/,$$d' requirements.lock; build/lock/bin/uv pip compile pyproject.toml --extra dev \
		--constraint constraints.txt --generate-hashes --universal --python-version 3.11.5 --no-annotate --no-header \
		--quiet; } > build/requirements.lock
	mv build/requirements.lock requirements.lock

audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet pip-audit
	build/audit/bin/pip-audit --strict --require-hashes --disable-pip --requirement requirements.lock

bench: $(INSTALLED)
	$(BIN)/python -m pytest benchmarks --benchmark-only -m "slow or not slow"

compatibility:
	$(PYTHON) .ci/compatibility.py --jobs $(JOBS) --write docs/compatibility.md

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks reports/out
