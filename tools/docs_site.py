"""A hook of the documentation site: the page of commands is made of their own help, when the site is built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from skipdecode.cli import VERBS

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """The page's text; README's links start at the pages, and each verb's help follows the heading of `commands.md`."""
    if page.file.src_uri == "index.md":  # which is README, as a snippet
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        return readme.replace("](docs/", "](")
    if page.file.src_uri != "commands.md":
        return markdown
    return markdown + "".join(f"\n## skipdecode {verb}\n\n```text\n{help_of(verb)}```\n" for verb in VERBS)


def help_of(verb: str) -> str:
    """What `skipdecode VERB --help` prints on 100 columns."""
    command = [sys.executable, "-m", "skipdecode", verb, "--help"]
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
