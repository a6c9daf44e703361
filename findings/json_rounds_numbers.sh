#!/usr/bin/env bash
# Guess: to_json writes a number with the digits that read back as the same float, as json.dumps and to_parquet do.
# Instead: numbers are rounded to ten decimals. Probabilities below 5e-11 become 0.0, and minus infinity becomes null. Nothing says so.
# Matters to: whoever keeps log-probabilities, probabilities or learning rates of a run as JSON lines; a zero where a small probability was makes a perplexity infinite.
# Versions: datasets 5.2.0 (through pandas 3.1.1).
# Users should: pass double_precision=15 for ordinary numbers, or write Parquet, or json.dumps each row.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'datasets==5.2.0' 'pandas==3.1.1'
venv/bin/python - <<'PY'
import json
import os

os.environ["HF_DATASETS_OFFLINE"] = "1"
import datasets

datasets.disable_progress_bars()
print("datasets", datasets.__version__)
row = {"probability": 1.25e-12, "logprob": -0.12345678901234567, "impossible": float("-inf")}
rows = datasets.Dataset.from_list([row])
rows.to_json("rows.jsonl")
rows.to_parquet("rows.parquet")
read = json.loads(open("rows.jsonl").read())
kept = datasets.load_dataset("parquet", data_files="rows.parquet", split="train", cache_dir="cache")[0]
print("row:         ", row)
print("from JSON:   ", read)
print("from Parquet:", kept)
print("json.dumps:  ", json.loads(json.dumps(row)))
assert kept == row == json.loads(json.dumps(row)), "Parquet or json.dumps loses digits"
assert read == {"probability": 0.0, "logprob": -0.123456789, "impossible": None}, "the behaviour has changed"
PY
