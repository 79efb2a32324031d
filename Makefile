PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
PYTEST := $(VENV)/bin/python -m pytest
SPREAD := --numprocesses auto --maxprocesses 4 --dist worksteal

.PHONY: install demo test test-slow check format clean

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

# Real processes, which are killed, and whose deadlines are seconds: what a busy moment of the machine broke gets a second
# try, one at a time
test-slow: install
	$(PYTEST) -m slow $(SPREAD) --durations 20 || $(PYTEST) -m slow --last-failed --last-failed-no-failures none

check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
