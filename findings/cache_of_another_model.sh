#!/usr/bin/env bash
# Guess: the file of lm-eval's `use_cache` keeps responses by model and request, so a second model under the same path is measured anew.
# Instead: the key is the kind of request and its arguments alone. A second model, or the same one with other arguments, gets the responses and so the score of the first, and nothing says so.
# Versions: lm-eval 0.4.13 (datasets 5.2.0).
# Users should: give each model, precision and schedule a path of its own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'lm-eval==0.4.13' 'datasets==5.2.0'
cat > measure.py <<'END'
import os

os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": os.getcwd(), "TQDM_DISABLE": "1"}
import json
from importlib.metadata import version

import lm_eval
from lm_eval.api.model import LM


class Says(LM):
    """A model that answers one word."""

    def __init__(self, word):
        super().__init__()
        self.word = word

    def generate_until(self, requests, **options):
        return [self.word] * len(requests)

    def loglikelihood(self, requests, **options):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps({"q": f"Is {i} a number?", "a": "yes"}) + "\n" for i in range(4))
task = {"task": "words", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}}, "test_split": "test"}
task |= {"output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}"}
task["metric_list"] = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
print("lm-eval", version("lm-eval"))
scores = []
for word, path in (("yes", "responses"), ("no", "responses"), ("no", "others")):
    found = lm_eval.simple_evaluate(model=Says(word), tasks=[task], use_cache=path, log_samples=False)
    scores.append(found["results"]["words"]["exact_match,none"])
    print(f"a model that answers {word!r}, use_cache={path!r}: exact match {scores[-1]}")
assert scores == [1.0, 1.0, 0.0], "the behaviour has changed"
END
venv/bin/python measure.py 2> errors || { cat errors; exit 1; }
