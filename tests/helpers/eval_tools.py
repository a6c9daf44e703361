"""A directory for `skipdecode eval` on a tiny model, and its command line."""

from __future__ import annotations

from pathlib import Path

from textgen_tools import save_tiny_model, write_rows

ROWS = [{"text": "ab" * (i % 4 + 1), "answer": f"<b>answer</b> & number {i}"} for i in range(8)]
TASK = 'name: mine\nprompt: "{text}:"\nreferences: [answer]\nmax_new_tokens: 6\nmetrics: [bleu, rougeL]\n'


def prepare(place: Path) -> None:
    """Leave a model, records and a task there."""
    save_tiny_model(place / "model")
    write_rows(place / "data.jsonl", ROWS)
    (place / "mine.yaml").write_text(TASK)


def arguments(
    place: Path, *more: str, model: str | Path = "", task: str | Path = "", data: str | Path = ""
) -> list[str]:
    """The command line; the model, the task and the data are those in `place` unless others are given."""
    fixed = [str(model or place / "model"), "--task", str(task or place / "mine.yaml")]
    fixed += ["--data", str(data or place / "data.jsonl"), "--resamples", "50", "--batch-size", "4"]
    return ["eval", *fixed, *more]
