# Two commands do everything: `make demo` (install, train, show the result), `make test` (install, check, test).
# Before a release also: `make docs` (the site, into build/site), `make wheel` (build it, install it, use it).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint format unit docs wheel clean

# PASSIVE: threads that wait do not spin; with another process on the two cores that is several times faster.
demo: $(INSTALLED)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/graphckpt train --config-file configs/quickstart.py

test: lint unit

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -q

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(INSTALLED)
	rm -rf build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist > /dev/null
	OMP_NUM_THREADS=1 $(BIN)/python tests/release/installed_wheel.py build/dist

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,docs,release]"
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) build dist output
