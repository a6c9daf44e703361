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


def arguments(place: Path, *more: str) -> list[str]:
    fixed = [str(place / "model"), "--task", str(place / "mine.yaml"), "--data", str(place / "data.jsonl")]
    return ["eval", *fixed, "--resamples", "50", "--batch-size", "4", *more]
