PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
PYTEST := $(VENV)/bin/python -m pytest
# Hundreds of processes are started: none should compile the package again
export PYTHONDONTWRITEBYTECODE :=
SPREAD := --numprocesses auto --maxprocesses 4 --dist worksteal

.PHONY: install demo test test-slow test-thorough check format clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (PyTorch is large: this takes a minute or more)"
	@$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install
	@$(VENV)/bin/hocket demo

test: install
	$(PYTEST) $(SPREAD)

# Real processes: what a busy moment of the machine broke gets a second try. In tests/real they are killed, and deadlines
# are seconds: one at a time, which takes no longer on 2 cores
FAILED := --last-failed --last-failed-no-failures none
test-slow: install
	$(PYTEST) -m slow --ignore tests/real $(SPREAD) || $(PYTEST) -m slow --ignore tests/real $(FAILED)
	$(PYTEST) -m slow tests/real --durations 20 || $(PYTEST) -m slow tests/real $(FAILED)

# Every combination of what the others take a choice of, and every repetition
test-thorough: install
	$(PYTEST) --thorough -m '' --ignore tests/real $(SPREAD)
	$(PYTEST) --thorough -m '' tests/real

check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
