"""What pages and scripts name is there, commands are accepted as written, examples run, and the site builds."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skipdecode.cli import VERBS, main
from skipdecode.cli.arguments import Parser, add_options

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "skipdecode"
# The log and the changelog name what is gone.
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


EXAMPLES = [ROOT / "README.md", ROOT / "docs" / "python.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def code_of(page: Path) -> str:
    """All examples of a page as one program, each on the lines where it stands."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * text.count("\n")
    for found in BLOCK.finditer(text):
        at = text.count("\n", 0, found.start(1))
        block = found[1].splitlines()
        lines[at : at + len(block)] = block
    return "\n".join(lines)


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_a_page_has_examples_that_are_python(page: Path):
    code = code_of(page)
    assert code.strip()
    compile(code, str(page), "exec")


@pytest.mark.model
@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.chdir(tmp_path)
    exec(compile(code_of(page), str(page), "exec"), {"__name__": "__main__"})
    assert "The Eagle" in capsys.readouterr().out


TOUR = ROOT / "docs" / "first-model.md"
SHORTER = {"--minutes 6": "--minutes 1", "--steps 60": "--steps 2", "--limit 64": "--limit 8"}
SHORTER |= {"rougeL": "rougeL --limit 8"}


@pytest.mark.model
def test_the_commands_of_the_tour_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in whole_commands(TOUR):
        if not command.startswith("skipdecode serve"):
            for whole, short in SHORTER.items():
                command = command.replace(whole, short)
            assert main(shlex.split(command)[1:]) == 0, command
    assert len((tmp_path / "texts.jsonl").read_text().splitlines()) == 30


ALL_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WORDS = {*VERBS, "bench", "calibrate", "report", "simulate"}  # a page that still shows a verb that was removed fails
CURRENT = [
    page for page in ALL_PAGES if page.name not in ("LOG.md", "changelog.md")
]  # what was written stays as it was


def whole_commands(page: Path) -> list[str]:
    """Commands of this package in a page's code blocks, continued lines joined, without what a shell adds."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"^\s*(?:\$ )?(?:\.venv/bin/)?(skipdecode [a-z]+ .*)$", text, re.M)
    return [re.split(r" [|>&]|  +#", command)[0] for command in found if command.split()[1] in WORDS]


def mentions(page: Path) -> list[str]:
    """Commands in the middle of a text, in backticks, which may leave something out."""
    found = re.findall(r"`(skipdecode [a-z]+[^`\n]*)`", page.read_text(encoding="utf-8"))
    return [command for command in found if command.split()[1] in WORDS]


def parser_of(verb: str) -> Parser:
    parser = Parser(prog=f"skipdecode {verb}")
    add_options(parser, importlib.import_module(f"skipdecode.cli.{verb}").Config)
    parser.add_argument("--debug", action="store_true")
    return parser


@pytest.mark.parametrize("page", CURRENT, ids=lambda path: path.name)
def test_commands_are_accepted_as_written(page: Path):
    for command in whole_commands(page):
        _, verb, *words = shlex.split(command, comments=True)
        parser_of(verb).read(words)


@pytest.mark.parametrize("page", CURRENT, ids=lambda path: path.name)
def test_options_that_a_text_names_are_there(page: Path):
    for command in mentions(page):
        _, verb, *words = command.split()
        flags = {word.partition("=")[0].rstrip(",…") for word in words if word.startswith("--")}
        assert flags - {"--help"} <= set(parser_of(verb)._option_string_actions), command


def test_pages_have_commands():
    assert sum(len(whole_commands(page)) for page in CURRENT) > 15
    assert sum(len(mentions(page)) for page in CURRENT) > 30


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http", "#", "mailto:")):
            assert (page.parent / target.split("#")[0]).exists(), target


def test_pages_for_users_name_no_test_and_no_entry_of_the_log():
    own = ("LOG.md", "CONTRIBUTING.md", "README.md", "adding-a-family.md", "architecture.md", "changelog.md")
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES if page.name not in own}
    assert [name for name, text in texts.items() if re.search(r"tests/\w+/|LOG\b", text)] == []


def test_every_page_but_the_log_has_its_place_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"LOG.md"}
    assert set(re.findall(r"([\w-]+\.md)$", navigation, re.M)) == pages


# The most lines: of a page, and of all pages but the log and the experiments. They only fall.
MOST_LINES = {"docs/LOG.md": 500, "docs/architecture.md": 150, "CHANGELOG.md": 60, "README.md": 100}
MOST_PAGE_LINES = 3_240


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_pages_stay_short_and_wrap_at_120():
    assert [name for name, most in MOST_LINES.items() if len(lines_of(ROOT / name)) > most] == []
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in ("LOG.md", "experiments.md")]
    assert sum(len(lines_of(page)) for page in pages) <= MOST_PAGE_LINES
    for page in [*ALL_PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        prose = [line for line in text.splitlines() if not line.startswith(("|", "    "))]
        assert [line for line in prose if len(line) > 120] == [], page.name


def test_entries_of_the_log_have_eight_lines_at_most_and_the_newest_comes_first():
    entries = re.split(r"^## ", (ROOT / "docs/LOG.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    days = [entry[:10] for entry in entries]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", day) for day in days)
    assert days == sorted(days, reverse=True)
    assert [entry[:40] for entry in entries if len([*filter(str.strip, entry.splitlines())]) > 9] == []


@pytest.mark.slow
def test_the_site_builds_and_shows_every_verb_and_public_name(tmp_path: Path):
    pytest.importorskip("mkdocs", reason="pip install 'skipdecode[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    commands = (tmp_path / "commands.html").read_text(encoding="utf-8")
    assert all(f"usage: skipdecode {verb}" in commands for verb in VERBS)
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    import skipdecode

    assert all(f'id="skipdecode.{name}"' in api for name in dir(skipdecode) if name != "__version__")
    page = re.sub(r"<a [^>]*>", "", (tmp_path / "index.html").read_text(encoding="utf-8"))
    assert not re.findall(r"(?:src|href)=.?https?:[^ >]*", page)  # nothing that a browser would fetch
