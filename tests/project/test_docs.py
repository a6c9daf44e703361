"""What the documents and scripts name is there: modules and what is in them, files of the repository."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "skipdecode"
# Entries of the log stay as they were written, and the changelog names what is gone.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs/LOG.md"}),
]
SCRIPTS = [path for folder in ("benchmarks", "examples", "tools") for path in sorted((ROOT / folder).glob("*.py"))]
ROOMS = "|".join(path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.glob("*.py")))

# `skipdecode.engine.fast`, or in backticks from the room on, as docs/architecture.md has it.
DOTTED = re.compile(rf"\bskipdecode\.(?!json\b)([a-z]\w*(?:\.\w+)*)|`((?:{ROOMS})\.(?!json\b)\w+(?:\.\w+)*)")
FILES = re.compile(
    rf"(?<![\w./-])(?:src|docs|tests|tools|benchmarks|examples|deploy|results|presets|{ROOMS})/[\w./*-]+"
)
PLACEHOLDER = "results/FILE.json"


def is_module(names: list[str]) -> bool:
    place = SOURCE.joinpath(*names)
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def is_there(dotted: str) -> bool:
    """Whether a module below the package, or a name in one, exists; what needs an absent package is taken as it is."""
    names = dotted.split(".")
    depth = 0
    while depth < len(names) and is_module(names[: depth + 1]):
        depth += 1
    try:
        found = importlib.import_module(".".join(["skipdecode", *names[:depth]]))
    except ImportError as error:  # of an extra too
        return not str(error.name).startswith("skipdecode")
    for name in names[depth:]:
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_modules_and_files_that_a_page_names_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    dotted = {one or other for one, other in DOTTED.findall(text)}
    assert not [name for name in sorted(dotted) if not is_there(name)]
    files = {found.rstrip(".") for found in FILES.findall(text)} - {PLACEHOLDER}
    assert not [name for name in sorted(files) if not any([*ROOT.glob(name), *SOURCE.glob(name)])]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_what_a_script_imports_from_the_package_exists(script: Path):
    tree = ast.parse(script.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if node.module and node.module.split(".")[0] == "skipdecode"]
    names = [".".join([*node.module.split(".")[1:], alias.name]) for node in ours for alias in node.names]
    assert not [name for name in names if not is_there(name)]
