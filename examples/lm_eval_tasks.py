"""Measure a model with lm-evaluation-harness at full depth and under schedules, on a task of your own file.

    pip install '.[lm-eval]'
    python examples/lm_eval_tasks.py smollm2-135m questions.jsonl 1.5x:flat 2x:flat

Lines of the file have `question`, `choices` (a list) and `answer` (number of the right one, from 0). For tasks of the
harness give their names to `simple_evaluate`, or on the command line: `python -m skipdecode.lm_eval --help`.
"""

import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

import skipdecode as sd
from skipdecode.lm_eval import SkipDecodeLM

TASK = {
    "task": "mine",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}


def main(model: str, file: str, *schedules: str) -> dict[str, dict[str, float]]:
    """The scores of each schedule; the model is loaded once."""
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(Path(file).absolute())}}}
    loaded = sd.load(model)
    found = {}
    for schedule in ("full", *schedules):
        lm = SkipDecodeLM(loaded, schedule, batch_size=16)
        manager = TaskManager(include_defaults=False)
        found[schedule] = lm_eval.simple_evaluate(lm, tasks=[task], task_manager=manager)["results"]["mine"]
    return found


if __name__ == "__main__":
    for schedule, scores in main(*sys.argv[1:]).items():
        print(schedule, {name: value for name, value in scores.items() if name.startswith("acc")})
