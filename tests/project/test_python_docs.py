"""The Python examples of README and docs/python.md run as they stand, page by page, from an empty directory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "python.md"]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_examples_that_are_python(page: Path):
    code = code_of(page)
    assert code.strip()
    compile(code, str(page), "exec")


@pytest.mark.model
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    exec(compile(code_of(page), str(page), "exec"), {"__name__": "__main__"})
    assert "The Eagle" in capsys.readouterr().out
