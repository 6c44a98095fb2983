# `make run` and `make test` each work alone on a fresh clone; a second call reuses the environment.

PYTHON ?= python3

# Every file that is installed has a hash in lock/ (`make lock` writes it); zsim itself comes after
# them, without dependencies, built by what was installed. torch is the CPU build where there is
# one, and else that of PyPI with its CUDA libraries.
PIP := -m pip install --quiet --disable-pip-version-check --no-deps
LOCKED := $(PIP) --require-hashes
ZSIM := $(PIP) --no-build-isolation -e .

.PHONY: run check test test-all test-long test-matrix test-studies docs lint ruff mypy pyright bench bench-predicted bench-real lock sbom release hooks format clean python

run: .venv-run/installed  ## simulate ZeRO-100B on 400 V100
	@.venv-run/bin/zsim run zero_100b

# Files in their order: those of real ranks, the longest, have short ones behind them. Commands that
# tests start find bytecode, also where PYTHONDONTWRITEBYTECODE is set: else a third of each goes
# into compiling zsim.
PYTEST := PYTHONDONTWRITEBYTECODE= .venv/bin/pytest --numprocesses 2 --dist loadfile \
  --no-loadscope-reorder --hypothesis-profile ci

# With CHANGED=1 only the tests that can reach what differs from HEAD; with CHANGED=COMMIT from that.
CHANGED ?=
ifneq ($(CHANGED),)
REACHED := --changed $(if $(filter 1,$(CHANGED)),HEAD,$(CHANGED))
endif

CHECKED = $(filter-out tests/unit/torch/ tests/unit/project/,$(wildcard tests/unit/*/)) \
  tests/unit/*.py tests/unit/project/test_tidy.py tests/unit/project/test_architecture.py \
  tests/unit/torch/test_training.py::test_an_overflow_skips_the_step_and_lowers_the_scale

TYPES = $(MAKE) --no-print-directory --jobs 2 --output-sync mypy pyright

check: ruff mypy  ## while you work: ruff, mypy, unit tests without torch, one training on two ranks
	@.venv/bin/python tests/support/plain_words.py --since HEAD
	@$(PYTEST) $(REACHED) --one-of 10 $(CHECKED)

# Types are checked while tests run, where a core is free; the answer is printed after theirs.
test: ruff  ## everything that has to pass, with a sample of each matrix; CHANGED=1: what a change can reach
	@mkdir -p build; $(TYPES) >build/types.txt 2>&1 & types=$$!; trap "kill $$types" INT TERM; \
	  $(PYTEST) $(REACHED) --file-seconds 20 --blame; tests=$$?; \
	  wait $$types; types=$$?; cat build/types.txt; exit $$((tests ? tests : types))

# MARKS selects tests by their marks, as pytest's -m does.
MARKS ?=

test-all: .venv/studies  ## every case of every matrix, long tests and studies: hours; MINUTES=45: of what test leaves out, what fits
	@$(PYTEST) $(if $(MINUTES),--rest-in $(MINUTES) --blame,--all-cases) -m "$(MARKS)" -rs

test-long: .venv/installed  ## thirty mutants of every operator, on every stage and runtime: the table of what is found
	@.venv/bin/pytest -m long -rP

test-matrix: .venv/installed  ## FSDP2 recorded over its whole matrix: no finding, and each wait that is dropped is missed
	@.venv/bin/pytest --all-cases -m "" tests/unit/torch/record/test_fsdp_matrix.py

test-studies: .venv/studies  ## sweeps that are killed, pages in a browser, traces in Holistic Trace Analysis
	@.venv/bin/pytest -m "studies and not long" tests/studies -rs

docs: .venv/docs  ## the documentation, in build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

lint: ruff
	@$(TYPES)

ruff: .venv/installed
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check

mypy: .venv/installed
	@.venv/bin/mypy

pyright: .venv/installed  ## of files that can have changed their types since it last found nothing
	@.venv/bin/python tests/support/changed_types.py

bench-predicted: .venv/installed  ## predicted steps of the ranks at hand beside measured ones; nothing else may run
	.venv/bin/python -m benchmarks.predicted

bench: .venv-run/installed  ## the 96-layer step, proofs, its cost up to 131,072 GPUs, a trillion parameters, what-ifs and runs of studies a second, the allocator, pages, pipelines, the planner
	.venv-run/bin/python benchmarks/step_96_layers.py
	.venv-run/bin/python benchmarks/check.py
	.venv-run/bin/python -m benchmarks.scale
	.venv-run/bin/python -m benchmarks.trillion
	.venv-run/bin/python -m benchmarks.study
	.venv-run/bin/python -m benchmarks.allocator
	.venv-run/bin/python -m benchmarks.page
	.venv-run/bin/python -m benchmarks.pipeline
	.venv-run/bin/python -m benchmarks.best
	.venv-run/bin/python -m benchmarks.best_quality

bench-real: .venv/installed  ## real steps on Gloo beside DDP, ZeroRedundancyOptimizer and FSDP2: ratios of time and memory
	.venv/bin/python -m benchmarks.real 2
	.venv/bin/python -m benchmarks.real 4

lock: .venv-lock/installed  ## lock/ again, after a change of pyproject.toml or constraints.txt
	.venv-lock/bin/python tests/support/lock.py

sbom: .venv/installed .venv-sbom/installed  ## what is installed, with licences: build/sbom.json (CycloneDX)
	@mkdir -p build
	.venv-sbom/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
	  --output-file build/sbom.json .venv/bin/python

release: .venv/installed  ## sdist and wheel, tried in a clean environment, and the tag of the version: docs/how_to/release.md
	@.ci/release

hooks:  ## check the subject of each commit: .githooks/commit-msg
	git config core.hooksPath .githooks

format: .venv/installed
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

clean:
	rm -rf .venv .venv-lock .venv-run .venv-sbom build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

# The stamps: an environment is made again when what it was made from has changed.
.venv-run/installed: pyproject.toml lock/run.txt | python
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(LOCKED) -r lock/run.txt
	$(@D)/bin/python $(ZSIM)
	@touch $@

.venv/installed: pyproject.toml lock/run.txt lock/test.txt lock/torch_cpu.txt lock/torch_cuda.txt | python
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(LOCKED) -r lock/run.txt -r lock/test.txt
	$(@D)/bin/python $(LOCKED) -r lock/torch_cpu.txt 2>/dev/null \
	  || $(@D)/bin/python $(LOCKED) -r lock/torch_cuda.txt
	$(@D)/bin/python $(ZSIM)
	@touch $@

.venv/studies: .venv/installed lock/studies.txt
	$(@D)/bin/python $(LOCKED) -r lock/studies.txt
	@touch $@

.venv/docs: .venv/installed lock/docs.txt
	$(@D)/bin/python $(LOCKED) -r lock/docs.txt
	@touch $@

.venv-sbom/installed: lock/sbom.txt | python
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(LOCKED) -r lock/sbom.txt
	@touch $@

.venv-lock/installed: constraints.txt | python
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip-tools
	@touch $@

python:
	@command -v $(PYTHON) >/dev/null 2>&1 \
	  || { echo "zsim needs Python 3.11 or newer: no $(PYTHON) found; say which: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "zsim needs Python 3.11 or newer, $(PYTHON) is older; say which: make PYTHON=..." >&2; exit 1; }
