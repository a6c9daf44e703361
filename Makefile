# Two commands do everything on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow lint clean

demo: .venv/ready
	$(BIN)/skipdecode demo

test: .venv/ready lint
	$(BIN)/python -m pytest -n auto

test-slow: .venv/ready
	$(BIN)/python -m pytest -m "slow or model"

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch .venv/ready

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
