"""Tests the package with the oldest and the newest versions that it accepts, each in a fresh virtual environment.

`newest` is what the README's own install line takes today. `oldest` has the lower bounds of pyproject.toml, with the
torch of constraints.txt. In both, `generate` and `prepare` run on a tiny model right after the installation, and then
the tests of models, of engines and of texts. Exits with 1 where something failed.

    python tools/versions.py oldest newest
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("torch", "transformers", "tokenizers", "peft", "accelerate")
TESTS = (
    "tests/models",
    "tests/engine/test_gated_engine.py",
    "tests/engine/test_engine.py",
    "tests/generation/test_llm.py",
)
# What these tests need besides the README's install line.
EXTRAS = "plot,structured"
TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis", "psutil", "httpx", "cyllama", "jsonschema", "scikit-learn")
# Random texts of this model soon meet one of its many end tokens. Its layers take most of the time of a step, as in
# real models: `prepare` measures, and smaller ones allow hardly any speed-up where Python is slow.
MAKE_TINY = """
import sys
from checkpoints import byte_tokenizer
from tiny import tiny_model
model = tiny_model("llama", vocab_size=320, intermediate_size=16384)
model.generation_config.eos_token_id = [2, *range(200, 259)]
model.save_pretrained(sys.argv[1])
byte_tokenizer().save_pretrained(sys.argv[1])
"""


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="+", choices=("oldest", "newest"))
    failed = [which for which in parser.parse_args().which if not passes(which)]
    print(f"versions: {', '.join(failed)} failed" if failed else "versions: all passed")
    return int(bool(failed))


def passes(which: str) -> bool:
    """Whether an environment of the oldest or newest versions can be made and passes."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
        only = folder / "constraints.txt"
        only.write_text("".join(f"{line}\n" for line in (lower_bounds() if which == "oldest" else ())))
        steps = (
            lambda: install(folder, only, *install_line()),
            lambda: use(folder),
            lambda: install(folder, only, f".[{EXTRAS}]", *TEST_TOOLS),
            lambda: pytest(folder),
        )
        done = all(step() == 0 for step in steps)
        print(f"{which}: {', '.join(versions(folder))}: {'passed' if done else 'FAILED'}", flush=True)
        return done


def install_line() -> list[str]:
    """The arguments of `pip install` in the README."""
    (found,) = re.findall(r"`pip install ([^`]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    return [word.strip("'") for word in found.split()]


def lower_bounds() -> list[str]:
    """Each range of the package at its lower bound; torch at the version of constraints.txt.

    Other builds of torch than the pinned one take several GB.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = dict(re.fullmatch(r"([\w-]+)>=([\d.]+).*", line).groups() for line in project["dependencies"])  # type: ignore[union-attr]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    bounds["torch"] = re.search(r"^torch==(.+)$", pinned, re.M)[1]  # type: ignore[index]
    return [f"{name}=={version}" for name, version in bounds.items()]


def install(folder: Path, only: Path, *what: str) -> int:
    """Install into the environment, from the checkout."""
    command = ["-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", "-c", str(only), *what]
    return run(folder, *command)


def use(folder: Path) -> int:
    """Generate and prepare with a tiny model, as after the README's installation."""
    model, tool = str(folder / "tiny"), ("-m", "skipdecode")
    generate = ("generate", model, "say a", "--schedule", "full", "--max-new-tokens", "4", "--no-template")
    prepare = ("prepare", model, "--self", "--self-records", "64", "--self-tokens", "48", "--target-speedup", "1.2")
    return (
        run(folder, "-c", MAKE_TINY, model)
        or run(folder, *tool, *generate)
        or run(folder, *tool, *prepare, "--minutes", "0", "--out", str(folder / "ready"))
    )


def pytest(folder: Path) -> int:
    """Run the tests; the package is the installed one."""
    return run(folder, "-m", "pytest", "-n", "auto", "-p", "no:cacheprovider", *TESTS)


def run(folder: Path, *arguments: str) -> int:
    """Run the environment's Python in the checkout; returns the exit code."""
    paths = {"PYTHONPATH": str(ROOT / "tests" / "helpers"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([str(folder / "env/bin/python"), *arguments], cwd=ROOT, env=os.environ | paths).returncode


def versions(folder: Path) -> list[str]:
    """The versions that were installed."""
    code = f"from importlib.metadata import version\nfor name in {SHOWN!r}: print(name, version(name))"
    listed = subprocess.run([str(folder / "env/bin/python"), "-c", code], capture_output=True, text=True)
    return listed.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main())
