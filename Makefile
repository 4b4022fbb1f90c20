# Six verbs. VENV is the environment to build and use; nothing is installed outside of it but the server environment of Triton,
# which lives in the user's cache folder. WORKERS is how many processes run the tests: each takes 1 GB of memory, and starts engines.
VENV ?= .venv
PYTHON ?= python3
WORKERS ?= 2
BIN = $(VENV)/bin
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: install demo test test-fast lint docs bench

install: $(VENV)/.installed

# One line for each step; what goes wrong is still shown.
$(VENV)/.installed: pyproject.toml constraints.txt triton_repo/server-requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; give one with PYTHON=")'
	@echo "environment    $(VENV), $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "packages       from the index, in the versions of constraints.txt; takes minutes the first time"
	@$(BIN)/pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev,tensorrt-rtx]'
	@$(BIN)/compress doctor --fix | grep '^triton server'
	@touch $@

demo: install
	@$(BIN)/compress run recipes/quickstart.yaml; status=$$?; [ $$status -eq 0 ] || [ $$status -eq 3 ]

test: install
	$(PYTEST)

test-fast: install
	$(PYTEST) -m 'not whole and not slow and not gpu'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: install
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/peers.py
