"""A small Llama with a byte-level tokenizer and records of our own for the tests of tuning."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from checkpoints import byte_tokenizer
from tiny import LAYERS, tiny_model

__all__ = ["LAYERS", "byte_tokenizer", "records", "save_model", "tuning_model", "write_jsonl"]


def tuning_model(model_type: str = "llama", **changes: Any) -> Any:
    """A random model of the tokenizer's vocabulary."""
    return tiny_model(model_type, vocab_size=259, **changes)


def save_model(directory: Path, **changes: Any) -> Path:
    """The model and the tokenizer as a directory that `load_model` takes."""
    tuning_model(**changes).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Records with the fields id, colour, thing and ref; lengths vary."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        colour, thing = rng.choice(["red", "blue", "green"]), rng.choice(["car", "house", "tree", "x"])
        ref = f"a {colour} {thing}" * rng.randint(1, 2)
        found.append({"id": f"r{number}", "colour": colour, "thing": thing, "ref": ref})
    return found


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Rows as JSON lines; bytes are written as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path
