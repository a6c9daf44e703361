"""Run the commands of a page and put what they print below them, as on docs/first-model.md.

    .venv/bin/python tools/console.py docs/first-model.md --folder /tmp/walk

In each block marked ```console, a line that begins with `$ ` is a command. A backslash continues the command; a command
that ends with `&` runs until the page is done. The output of a command replaces the lines below it; the middle of a
long output is left out.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

BLOCK = re.compile(r"(?<=```console\n)(.*?)(?=^```)", re.M | re.S)
COMMAND = re.compile(r"^\$ (?:.*\\\n)*.*$", re.M)
MOST_LINES, KEPT = 40, (14, 27)
STARTS_IN = 60  # seconds that a command that goes on is given to begin


class Console:
    """A folder in which commands run, and those that go on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[str]] = []
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "PATH": path}

    def block(self, text: str) -> str:
        """A block's commands with what they print."""
        return "".join(f"{command}\n{self.output(command)}" for command in COMMAND.findall(text))

    def output(self, command: str) -> str:
        """What a command prints, standard error included; the middle of a long output is left out."""
        print(command, file=sys.stderr)
        line = command.removeprefix("$ ")
        if line.endswith("&"):
            return self._begin(line.removesuffix("&"))
        done = subprocess.run(
            line, shell=True, cwd=self._folder, env=self._environment, text=True, stdout=-1, stderr=subprocess.STDOUT
        )
        lines = [each.rsplit("\r", 1)[-1].rstrip() for each in done.stdout.rstrip().splitlines()]
        if len(lines) > MOST_LINES:
            lines = [*lines[: KEPT[0]], "…", *lines[-KEPT[1] :]]
        return "".join(f"{each}\n" for each in lines)

    def end(self) -> None:
        """Stop what still runs."""
        for process in self._running:
            process.terminate()

    def _begin(self, line: str) -> str:
        log = self._folder / f"running-{len(self._running)}.log"
        with log.open("w") as file:
            self._running.append(
                subprocess.Popen(
                    f"exec {line}", shell=True, cwd=self._folder, env=self._environment, stdout=file, stderr=file
                )
            )
        size, end = -1, time.monotonic() + STARTS_IN
        # Until it has printed something, and nothing more for 5 seconds.
        while time.monotonic() < end and (not size or size != log.stat().st_size):
            size = log.stat().st_size
            time.sleep(5)
        return log.read_text(encoding="utf-8")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="where the commands run")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    console = Console(options.folder)
    try:
        page = BLOCK.sub(lambda found: console.block(found[1]), options.page.read_text(encoding="utf-8"))
    finally:
        console.end()
    options.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
