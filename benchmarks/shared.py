"""What the scripts have in common: arguments, result files, prompts of E2E, and commands that they run."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skipdecode.common.environment import environment
from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import heading
from skipdecode.data.source import load_records
from skipdecode.data.tasks import load_task
from skipdecode.evaluation.run import encode_prompts

TASKS = Path(__file__).parent / "tasks"
RESULTS = Path(__file__).parents[1] / "results"


def timed(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def script_parser(
    description: str | None, default: Path | None = None, result: str = "result file (JSON)"
) -> argparse.ArgumentParser:
    """A parser with the docstring of a script, and `--out`, which is required if it has no default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=default, required=default is None, help=result)
    return parser


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options of a run, JSON-ready, without paths of this machine."""
    config = {name: value for name, value in vars(options).items() if name != "data" and not isinstance(value, Path)}
    return config | ({"model": Path(config["model"]).name} if "model" in config else {})


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON document in one step."""
    write_whole(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def write_result(
    path: Path, benchmark: str, found: Mapping[str, Any], options: argparse.Namespace | None = None
) -> None:
    """Write the result of a script: where and with which options it was measured, and what was found."""
    about = {} if options is None else {"config": config_of(options)}
    write_json(path, {**heading("benchmark", benchmark), "environment": environment(), **about, **found})


def e2e_prompts(file: Path, tokenizer: Any, limit: int | None = None) -> list[list[int]]:
    """Token ids of the prompts of E2E records."""
    task = load_task("e2e")
    return encode_prompts(task.template, load_records(task, str(file), limit=limit), tokenizer)[1]
