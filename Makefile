# Two commands do everything on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow browser lint clean

demo: .venv/ready
	$(BIN)/skipdecode demo

test: .venv/ready lint
	$(BIN)/python -m pytest -n auto

test-slow: .venv/ready browser
	$(BIN)/python -m pytest -m "slow or model" -rs

# The playground's tests drive a real browser. Without one, and without the right to install it, they are skipped.
browser:
	@if command -v chromium >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; \
	else echo "chromium is missing: install it (Debian: apt-get install chromium), or the playground's tests are skipped"; fi

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
