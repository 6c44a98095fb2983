# `make run` and `make test` each work alone on a fresh clone; a second call reuses the environment.

PYTHON ?= python3

# pip builds zsim in an environment of its own; the variables (for older and newer pip) pin that too.
PIP_PINS := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: run test test-long test-studies docs lint bench format clean python

run: .venv-run/installed  ## simulate ZeRO-100B on 400 V100
	@.venv-run/bin/zsim run zero_100b

test: lint  ## everything that has to pass, a file at a time on each of two cores
	@.venv/bin/pytest --numprocesses 2 --dist loadfile --hypothesis-profile ci

test-long: .venv/installed  ## thirty mutants of every operator, on every stage and runtime: the table of what is found
	@.venv/bin/pytest -m long -rP

test-studies: .venv/studies  ## sweeps that are killed, pages in a browser, traces in Holistic Trace Analysis
	@.venv/bin/pytest -m studies tests/studies -rs

docs: .venv/docs  ## the documentation, in build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

lint: .venv/installed
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check
	@.venv/bin/mypy
	@.venv/bin/pyright

bench: .venv-run/installed  ## the 96-layer step, proofs, its cost up to 131,072 GPUs, what-ifs and runs of studies a second, the allocator, pages
	.venv-run/bin/python benchmarks/step_96_layers.py
	.venv-run/bin/python benchmarks/check.py
	.venv-run/bin/python -m benchmarks.scale
	.venv-run/bin/python -m benchmarks.study
	.venv-run/bin/python -m benchmarks.allocator
	.venv-run/bin/python -m benchmarks.page

format: .venv/installed
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

clean:
	rm -rf .venv .venv-run build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

# The stamps: an environment is made again when what it was made from has changed.
.venv-run/installed: pyproject.toml constraints.txt | python
	$(PYTHON) -m venv $(@D)
	$(PIP_PINS) $(@D)/bin/python $(PIP_INSTALL) -e '.[report]'
	@touch $@

.venv/installed: pyproject.toml constraints.txt | python
	$(PYTHON) -m venv $(@D)
	$(PIP_PINS) $(@D)/bin/python $(PIP_INSTALL) -e '.[torch,dev,draw,report,calibrate]'
	@touch $@

.venv/studies: .venv/installed
	$(PIP_PINS) $(@D)/bin/python $(PIP_INSTALL) -e '.[torch,dev,draw,report,calibrate,studies]'
	@touch $@

.venv/docs: .venv/installed
	$(PIP_PINS) $(@D)/bin/python $(PIP_INSTALL) -e '.[torch,dev,draw,report,calibrate,docs]'
	@touch $@

python:
	@command -v $(PYTHON) >/dev/null 2>&1 \
	  || { echo "zsim needs Python 3.11 or newer: no $(PYTHON) found; say which: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "zsim needs Python 3.11 or newer, $(PYTHON) is older; say which: make PYTHON=..." >&2; exit 1; }
