# `make help` lists the targets. Everything runs in .venv; `setup` makes it when it is missing, or
# when pyproject.toml or constraints.txt have changed.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
SOURCE ?= digits
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Checkers are called as modules: the scripts in bin/ break when the clone is moved.
RUN := $(BIN)/python -m
# Two processes, which take a file each: each imports everything once more, and has its own children.
IN_TWO := -n 2 --dist loadfile
# Tests start hundreds of processes, and each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-eval wheel quickstart quickstart-images test test-slice test-all check gpu-check gpu-speed fake-gpu picture docs configs clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-18s %s\n", $$1, $$2}' Makefile

setup: $(INSTALLED)  ## the virtual environment with pinned packages

setup-eval: setup  ## lm-eval too
	@$(RUN) pip install --disable-pip-version-check -q -c constraints.txt -e '.[eval]'

wheel: setup  ## a package in dist/, which pip installs anywhere
	@$(RUN) pip wheel --disable-pip-version-check -q --no-deps --no-build-isolation -w dist .
	@ls dist/polyad-*.whl

quickstart: setup  ## text to perplexity in two processes: minutes
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh configs/quickstart/run.sh

quickstart-images: setup  ## images to accuracy in two processes: minutes; SOURCE=hub:uoft-cs/cifar10
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh configs/quickstart/run-images.sh $(SOURCE)

test: setup  ## the everyday suite and one slice of the slow tests
	@$(RUN) pytest -q --slice due $(IN_TWO) --durations=10

test-slice: setup  ## one of the 20 slices of the slow tests: SLICE=7
	@$(RUN) pytest -q -m slow --slice $(or $(SLICE),due) $(IN_TWO)

test-all: setup  ## every test: hours
	@$(RUN) pytest -q --slice all $(IN_TWO)

check: setup  ## lint, format, types, the direction of imports, slow tests; prints lines by room
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@$(BIN)/python -c 'import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())' --no-logo
	@$(RUN) tests.slices
	@$(RUN) tests.ruler

gpu-check:  ## tests on a GPU, nine minutes: WHEELS=folder (tests/gpu/wheels.py), ONLY="tests train"
	@$(PYTHON) tests/gpu/check.py $(if $(WHEELS),--wheels $(WHEELS)) $(if $(ONLY),--only $(ONLY))

gpu-speed:  ## where the time of a step on a GPU goes, nine minutes: WHEELS=folder, ONLY="dense smoe"
	@$(PYTHON) -m tests.gpu.speed $(if $(WHEELS),--wheels $(WHEELS)) $(if $(ONLY),--only $(ONLY))

fake-gpu: setup  ## steps of every configuration on a GPU that is not there; installs PyTorch with CUDA, 5 GB
	@test -x .fake-gpu/bin/python || $(PYTHON) -m venv .fake-gpu
	@rm -f .fake-gpu/lib/python3.*/site-packages/of-the-project.pth  # pip would find the CPU's PyTorch there
	@env -u PIP_FIND_LINKS PIP_CONSTRAINT= PIP_CONFIG_FILE=/dev/null .fake-gpu/bin/python -m pip install --disable-pip-version-check -q \
	  "torch==$$($(BIN)/python -c 'import torch; print(torch.__version__.split("+")[0])')"
	@$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	  > "$$(echo .fake-gpu/lib/python3.*/site-packages)/of-the-project.pth"
	@.fake-gpu/bin/python -m pytest -q -n 2 -m slow --slice all tests/gpu/fake

picture: setup  ## docs/experts.png, the page of the quickstart's experts; needs chromium and runs/quickstart
	@$(BIN)/polyad report runs/quickstart/run --knockout --tokens 16384 --output runs/quickstart/report.html
	@chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1150,760 \
	  --screenshot=docs/experts.png file://$(CURDIR)/runs/quickstart/report.html

docs: setup  ## the documentation as a site in site/, to open site/index.html; a broken link fails
	@$(RUN) docs.site site

configs: setup  ## the files of runs in configs/, from tests/configs/deltas
	@$(RUN) tests.configs.writing

clean:  ## remove caches; keeps .venv and runs/
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build *.egg-info
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# On a terminal pip's lines renew a single one; its warnings are shown only if it fails.
$(INSTALLED): pyproject.toml constraints.txt model/kernels/cpu/gelu.c
	@command -v $(PYTHON) > /dev/null || { echo "make: there is no $(PYTHON); name a Python 3.11 or newer: make PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make: $(PYTHON) is $$($(PYTHON) --version), 3.11 or newer is needed: make PYTHON=..." >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages into $(VENV): a minute, or as long as the downloads take" >&2
	@$(RUN) pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]' 2> $(VENV)/install.log \
	  | if [ -t 2 ]; then while IFS= read -r line; do printf '\r\033[K%.78s' "$$line" >&2; done; printf '\r\033[K' >&2; else cat > /dev/null; fi \
	  || { cat $(VENV)/install.log >&2; exit 1; }
	@touch $@
	@echo "installed" >&2
