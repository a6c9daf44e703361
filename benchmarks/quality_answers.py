"""A tuned checkpoint's own answers to the prompts of its task, to tune on in place of the references.

    python benchmarks/quality_answers.py runs/e2e-full-b --task e2e --data path/to/e2e --out runs/e2e-full-b-answers

Sequence-level distillation (Kim and Rush, arXiv 1606.07947): every prompt of the training file once, greedy answers at
full depth in bf16. Of a text that the task cuts, the next two pieces of it are prompts too: they cost no labels.

named.jsonl has all of train.jsonl, and the rows whose names stand in the answer once more under invented ones: E2E has
34 names, which a model learns by heart instead of copying them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from invented_names import invented_names, renamed

from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import json_line
from skipdecode.data.records import Template
from skipdecode.data.tasks import load_task

_HELD_OUT = 64
_PIECES = 3
_WORDS_A_TOKEN = 0.8
NAME = re.compile(r"(?:name|near)\[([^\]]+)\]")


def prompts(rows: Iterable[dict[str, Any]], template: Template) -> list[dict[str, str]]:
    """The fields of every prompt, none twice, and of the pieces of a text that is cut, shuffled."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        values = template.values(row)
        for piece in (values, *_pieces(values, template)):
            found.setdefault(template.render(piece), piece)
    shuffled = list(found.values())
    random.Random(0).shuffle(shuffled)
    return shuffled


def _pieces(values: dict[str, str], template: Template) -> Iterator[dict[str, str]]:
    """What follows the part of a text that its own prompt holds: whole sentences, about as many words as fit."""
    if template.truncate is None or template.max_prompt_tokens is None:
        return
    most, pieces = int(_WORDS_A_TOKEN * template.max_prompt_tokens), [""]
    for sentence in re.split(r"(?<=[.!?])\s+", values[template.truncate].strip()):
        if pieces[-1] and len(f"{pieces[-1]} {sentence}".split()) > most:
            pieces.append("")
        pieces[-1] = f"{pieces[-1]} {sentence}".strip()
    for piece in pieces[1:_PIECES]:
        if len(piece.split()) > most // 2:
            yield {**values, template.truncate: piece}


def named(rows: Iterable[dict[str, str]], response: str) -> Iterator[dict[str, str]]:
    """Rows with other names, the same in prompt and answer; none of those whose answer has not got them all."""
    draw = random.Random(0)
    for row in rows:
        found = NAME.findall(" ".join(value for field, value in row.items() if field != response))
        if found and all(name in row[response] for name in found):
            names = invented_names(found, draw)
            yield {field: renamed(value, names) for field, value in row.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, and write train.jsonl and dev.jsonl; returns the exit code of `skipdecode generate`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--task", required=True)
    parser.add_argument("--data", type=Path, required=True, help="directory with train.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    out, task = options.out, load_task(options.task)
    template = task.template()
    with (options.data / "train.jsonl").open(encoding="utf-8") as file:
        asked = prompts(map(json.loads, file), template)
    questions, text = out / "prompts.jsonl", b"".join(map(json_line, asked))
    if not questions.exists() or questions.read_bytes() != text:  # answers go on only with the very file
        write_whole(questions, text)
    command = ["skipdecode", "generate", options.checkpoint, "--task", options.task, "--dtype", "bfloat16"]
    files = ["--input", str(questions), "--output", str(out / "answers.jsonl"), "--overwrite"]
    ends = ["--stop", *(text.replace("\n", "\\n") for text in task.stop)] if task.stop else []
    limits = ["--batch-size", "64", "--max-new-tokens", str(task.max_new_tokens)]
    code = subprocess.run([*command, *limits, *files, *ends]).returncode
    if code:
        return code
    with (out / "answers.jsonl").open(encoding="utf-8") as lines:
        answers = [json.loads(line) for line in lines]
    ended = [(row, a["text"].strip()) for row, a in zip(asked, answers, strict=True) if a["finish_reason"] != "length"]
    rows = [{**row, template.responses[0]: text} for row, text in ended if text]
    print(f"{len(rows)} of {len(asked)} answers came to an end")
    dev, train = rows[:_HELD_OUT], rows[_HELD_OUT:]
    more = list(named(train, template.responses[0]))
    # train.jsonl last: it says that all is there.
    for name, part in (("dev", dev), *([("named", train + more)] if more else []), ("train", train)):
        write_whole(out / f"{name}.jsonl", b"".join(map(json_line, part)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
