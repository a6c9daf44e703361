#!/usr/bin/env bash
# Guess: a JSON string is loaded as a string; JSON has no dates.
# Instead: a column in which every value looks like an ISO date becomes a timestamp, and rows hold datetime objects. A time zone is converted away. One other value in the column brings the strings back, so the type depends on the rows.
# Versions: datasets 5.2.0 (through pyarrow).
# Users should: pass features= to load_dataset for every column of answers or labels.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'datasets==5.2.0'
venv/bin/python - <<'EOF'
import json
import os

os.environ["HF_DATASETS_OFFLINE"] = "1"
import datasets

datasets.disable_progress_bars()
print("datasets", datasets.__version__)
columns = {"dates": ["2024-01-02", "2024-01-03"], "mixed": ["2024-01-02", "last year"], "zoned": ["2024-01-02T10:00:00+05:00", "2024-01-02T10:00:00Z"]}
seen = {}
for name, values in columns.items():
    with open(f"{name}.jsonl", "w") as file:
        file.writelines(json.dumps({"answer": value}) + "\n" for value in values)
    rows = datasets.load_dataset("json", data_files=f"{name}.jsonl", split="train", cache_dir="cache")
    seen[name] = rows.features["answer"].dtype
    print(name, values, "->", seen[name], rows["answer"][:])
assert seen["mixed"] == "string" and seen["dates"].startswith("timestamp") and seen["zoned"].startswith("timestamp"), "the behaviour has changed"
EOF
