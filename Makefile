# The two commands of a new user are `make demo` and `make test`; both make .venv first.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
MXNET := .venv-mxnet

.PHONY: demo test quick check format clean

demo: $(VENV)/.torch
	$(RUN)/lockstep demo

# All tests, the slow ones too. `make quick` leaves those out.
test: $(VENV)/.dev $(MXNET)/.made
	$(RUN)/python -m pytest

quick: $(VENV)/.dev $(MXNET)/.made
	$(RUN)/python -m pytest -m "not slow"

check: $(VENV)/.dev
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: $(VENV)/.dev
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

$(VENV)/.torch: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,dev]'
	touch $@

# MXNet, which tests of RecordIO hold files against, needs an older NumPy than everything else.
$(MXNET)/.made: constraints-mxnet.txt
	$(PYTHON) -m venv $(MXNET)
	$(MXNET)/bin/python -m pip install --quiet --constraint $< mxnet numpy
	touch $@

clean:
	rm -rf $(VENV) $(MXNET) demo
