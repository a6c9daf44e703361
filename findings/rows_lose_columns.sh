#!/usr/bin/env bash
# Guess: Dataset.from_list makes a column of each key, with None where a row lacks the key, as load_dataset("json") does with the same rows.
# Instead: the keys of the first row are the columns. A key that first comes later is dropped without a warning. Inside a nested dictionary such a key is kept.
# Versions: datasets 5.2.0.
# Users should: give the first row all keys, or pass features=.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'datasets==5.2.0'
venv/bin/python - <<'EOF'
import os

os.environ["HF_DATASETS_OFFLINE"] = "1"
import json

import datasets

datasets.disable_progress_bars()
print("datasets", datasets.__version__)
rows = [{"prompt": "a", "meta": {"x": 1}}, {"prompt": "b", "completion": "c", "meta": {"y": 2}}]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
listed = datasets.Dataset.from_list(rows)
loaded = datasets.load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache")
print("from_list:", listed.column_names, listed[1])
print("load_dataset json:", loaded.column_names, loaded[1])
assert "completion" not in listed.column_names and "completion" in loaded.column_names and listed[1]["meta"]["y"] == 2, "the behaviour has changed"
EOF
