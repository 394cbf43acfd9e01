# make demo     everything set up, a full BRIDGE run on the mini world: before/after table, curves, a report (minutes on two cores)
# make pocket   the same loop with real weights on real questions, at a small size: warm start, two steps
# make test     everything set up, linter and test suite
# make test-all the suite with the tests that take minutes each, too
# PYTHON=python3.12 make test   with another interpreter (3.11 to 3.13)

PYTHON ?= python3
VENV ?= .venv
# Processes the tests run in; whole runs in miniature are mostly compilation, which uses one core.
WORKERS ?= 2
RUN := $(VENV)/bin/python
# A small run of configs/pocket.py: fewer passages, traces, questions and steps.
POCKET ?= --config.index.limit=1800 --config.warmstart.questions=48 --config.warmstart.batch=4 --config.train.steps=2 \
	--config.train.questions=2 --config.grpo.minibatch_questions=2 --config.rollout.batch_groups=2 --config.data.eval_limit=16

.PHONY: demo pocket test test-all lint setup clean

demo: $(VENV)/.installed
	$(RUN) -m bridge_jax.train --config=configs/mini.py --workdir=runs/demo $(DEMO)

pocket: $(VENV)/.installed
	$(RUN) -m bridge_jax.warmstart --config=configs/pocket.py --workdir=runs/pocket-small $(POCKET)
	$(RUN) -m bridge_jax.train --config=configs/pocket.py --workdir=runs/pocket-small $(POCKET)

test: $(VENV)/.installed-test lint
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile -m 'not long'

test-all: $(VENV)/.installed-test lint
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(RUN) -m mypy

setup: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { echo "bridge_jax needs Python 3.11 to 3.13; name one: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: setup.py | $(VENV)/bin/python
	$(RUN) -m pip install -q -e .
	touch $@

$(VENV)/.installed-test: setup.py | $(VENV)/bin/python
	$(RUN) -m pip install -q -e '.[test]'
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build *.egg-info
