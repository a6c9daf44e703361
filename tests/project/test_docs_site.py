"""The documentation: commands on its pages are accepted as written, links lead somewhere, and the site builds."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from skipdecode.cli import VERBS
from skipdecode.cli.arguments import Parser, add_options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WORDS = {*VERBS, "bench", "calibrate", "report", "simulate"}  # a page that still shows a verb that was removed fails
CURRENT = [page for page in PAGES if page.name not in ("LOG.md", "changelog.md")]  # what was written stays as it was


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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http", "#", "mailto:")):
            assert (page.parent / target.split("#")[0]).exists(), target


def test_every_page_has_its_place_in_the_navigation():
    listed = set(re.findall(r"([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")}


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
