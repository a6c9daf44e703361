# Two commands do everything on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test quick test-slow test-versions test-vllm docs browser arm node lint format lock clean

demo: .venv/ready
	$(BIN)/python examples/demo.py

test: .venv/ready lint
	$(BIN)/python -m pytest -n auto --durations=25

# The inner loop: lint, and the tests of structure, schedules, options and two families against the oracle.
QUICK := tests/project/test_structure.py tests/schedule tests/common/test_options.py tests/models/test_oracle.py
quick: .venv/ready lint
	$(BIN)/python -m pytest $(QUICK) -k "not test_oracle or llama- or gpt2-"

test-slow: .venv/conformance .venv/npm browser arm
	$(BIN)/python -m pytest -m "slow or model" -rs

# The playground's tests drive a real browser. Without one, and without the right to install it, they are skipped.
browser:
	@if command -v chromium >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; \
	else echo "chromium is missing: install it (Debian: apt-get install chromium), or the playground's tests are skipped"; fi

# A cross compiler and an emulator run the kernels for ARM. Without them, these tests are skipped.
arm:
	@if command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			g++-aarch64-linux-gnu qemu-user; \
	else echo "the kernels for ARM are not tested: install (Debian) g++-aarch64-linux-gnu and qemu-user"; fi

# OpenAI's client for JavaScript, which a test of the server runs in node.
.venv/npm: .venv/ready node
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix .venv/npm openai@6.49.0; \
	else echo "npm is missing: install it (Debian: apt-get install npm), or the test of the npm package openai is skipped"; fi

node:
	@if ! command -v npm >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends npm; fi

# The README's install line with what it takes today, and the oldest versions that pyproject.toml accepts.
test-versions:
	$(PYTHON) tools/versions.py newest oldest

# The vLLM plugin is tested in an environment of its own, outside the checkout (about 5 GB, made once): all tests on one
# vLLM, one file on the oldest that is accepted and on the newest build. Where it cannot be made, these tests are skipped,
# and the reason is printed.
VLLM_ENV ?= $(HOME)/.cache/skipdecode/vllm-env
test-vllm:
	@status=0; $(PYTHON) tools/vllm_env.py $(VLLM_ENV) || status=$$?; \
	if [ $$status = 75 ]; then echo "test-vllm: SKIPPED, for the reason above"; \
	elif [ $$status != 0 ]; then exit $$status; \
	else $(VLLM_ENV)/bin/python tools/vllm_versions.py; fi

# The documentation as a site that fetches nothing. Its pages work from their folder; the search needs a server.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html; with its search: $(BIN)/python -m http.server -d build/site"

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Every version that .venv holds, without this package and without a build's suffix (torch's "+cpu").
lock: .venv/ready
	$(BIN)/python -m pip freeze --disable-pip-version-check --exclude-editable | sed -E '/ @ /d; s/\+[a-z0-9.]+$$//' > requirements.lock

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch .venv/ready

# The server's clients, for the tests that run against them. They want older versions of some packages than .venv/ready
# took; the pip of some Pythons searches for a combination for longer than anyone waits, pip 25 and later for seconds.
.venv/conformance: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25'
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev,conformance]'
	touch .venv/conformance

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
