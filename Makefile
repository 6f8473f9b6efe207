# Each target works as the only command typed in a fresh clone: the first one makes .venv and installs once.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Written last, so an install that was interrupted leaves none and the next call starts it over.
STAMP := $(VENV)/installed

# One thread a process.  States are small: with more threads the workers wait for each other (ten times slower on
# a busy two-core machine), and parallel work is one process a core anyway.  A value that you set wins.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help study test test-slow clean python-found

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

study: $(STAMP) ## run experiments/quickstart and write results/quickstart/report.html
	@$(VENV)/bin/quantlab study experiments/quickstart --output results/quickstart
	@test -s results/quickstart/report.html || { echo 'make: the study ended without a report' >&2; exit 1; }
	@echo 'report: $(CURDIR)/results/quickstart/report.html'

test: $(STAMP) ## lint, format, types, then the fast tests
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m basedpyright
	$(call pytest,not slow)

test-slow: $(STAMP) ## the tests that take minutes
	$(call pytest,slow)

clean: ## remove .venv, build outputs and caches; results/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find quantlab kernels evals tests experiments -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# One process a core (-n auto).  Status 5 is "no test selected": a tier may be empty, but never silently.
define pytest
@echo "$(RUN) -m pytest -m '$(1)'"
@$(RUN) -m pytest -n auto --maxprocesses 4 --dist worksteal -m '$(1)' || { status=$$?; test $$status -eq 5 || exit $$status; \
	echo 'make: NOTE: no test is marked "$(1)", so nothing was run' >&2; }
endef

# The shell stops at the first failure; an environment that could not be completed is removed, one that was there
# before is not.
$(STAMP): pyproject.toml constraints.txt | python-found
	@rm -f $@
	@if [ ! -e $(VENV) ]; then \
	  echo 'make: creating $(VENV)'; \
	  trap 'rm -rf $(VENV); exit 1' INT TERM; \
	  $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo 'make: $(PYTHON) -m venv failed' >&2; exit 1; }; \
	fi
	@echo 'make: installing into $(VENV); minutes the first time'
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,study]'
	@echo '$(CURDIR)' > $@

# Looked at on every call; a sound environment passes without a word.
python-found:
	@if [ ! -e $(VENV) ]; then \
	  $(PYTHON) -c '$(recent)' 2>/dev/null || { \
	    echo "make: quantlab needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	      'name another: make PYTHON=python3.12 ...' >&2; exit 1; }; \
	else \
	  $(RUN) -c 'import pip' 2>/dev/null || { \
	    echo 'make: $(VENV) is broken (its Python does not start, or has no pip): run "make clean", then this again' >&2; exit 1; }; \
	  $(RUN) -c '$(recent)' || { \
	    echo "make: $(VENV) was made by $$($(RUN) --version), quantlab needs 3.11 or newer: run \"make clean\"," \
	      'then this again' >&2; exit 1; }; \
	  have=$$($(RUN) --version) want=$$($(PYTHON) --version 2>&1); test "$$have" = "$$want" || \
	    echo "make: NOTE: $(VENV) was made by $$have and stays in use; $(PYTHON) is $$want" >&2; \
	  if [ -e $(STAMP) ] && ! grep -qxF '$(CURDIR)' $(STAMP); then \
	    echo 'make: $(VENV) was installed for another folder: run "make clean", then this again' >&2; exit 1; fi; \
	fi

recent := import sys; sys.exit(sys.version_info < (3, 11))
