"""Recipes of the field beside the project's: one model, the same answers, minutes and predicted request speed-up.

    python benchmarks/recipes.py runs/e2e --task e2e --data data/e2e/dev.jsonl --minutes 6 --work runs/recipes \\
      --out results/recipes-qwen2.5-coder-0.5b.json

`runs/e2e` is the `--out` of a `prepare` that learned own answers. Every recipe tunes the model of `runs/e2e`/full with
the same batches, rate and distributions under a schedule of the same predicted request speed-up; the baselines run the
same layers for prompts and at every position, without a fit. `kept` is the worst score as a share of full depth's
before. Early exit is trained for its exit alone, in place of LayerSkip's (arXiv 2404.16710) loss over all exits. An
interrupted run goes on with the same command.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared import script_parser, write_result

import skipdecode
from skipdecode import Schedule
from skipdecode.cost.model import CostModel, TextCost
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.checkpoint import LoadedModel
from skipdecode.schedule.order import top_down

OF_PREPARE: dict[str, Any] = {
    "batch_size": 4,
    "learning_rate": 3e-4,
    "distill_weight": 1.0,
    "eval_every": 200,
    "merge": True,
}


def recipes(calibration: dict[str, Any], text: TextCost) -> dict[str, Schedule]:
    """The schedule of each recipe; all have about the speed-up of the calibration's."""
    ours = Schedule.from_dict(calibration["schedule"])
    layers = ours.num_layers
    influence = calibration["block_influence"]
    order = sorted(range(1, layers - 1), key=influence.__getitem__)

    def flat(depth: int) -> dict[str, Schedule]:
        even = Schedule.even(layers, depth)
        return {
            "static pruning, healed": Schedule.constant(layers, depth, prompt="max_exit", drop_order=order),
            "unified layer skipping": replace(even, prompt="max_exit"),
            "early exit": Schedule.constant(layers, depth, prompt="max_exit", drop_order=top_down(layers, 1)),
        }

    nearest = min(
        range(2, layers), key=lambda n: abs(text.speedup(flat(n)["static pruning, healed"]) - text.speedup(ours))
    )
    falling = replace(ours, name=f"{ours.name}-bare")
    return {"ours": ours, "ours without a fit": falling, **flat(nearest)}


def measured(model: LoadedModel, run: Path, name: str, schedule: Schedule, options: Any) -> dict[str, Any]:
    """What a recipe keeps after its minutes, and how fast its requests are."""
    folder = options.work / name.replace(",", "").replace(" ", "-")
    file = run / "fit" / "schedule.json"
    if name != "ours":
        schedule.save(file := folder / "schedule.json")
    answers = run / "answers"
    tuned = skipdecode.tune(
        model,
        str(answers / "self.jsonl"),
        str(answers / "self-dev.jsonl"),
        out=folder / "tuned",
        schedule=file,
        task=options.task,
        minutes=options.minutes,
        distributions=str(answers / "distributions.safetensors"),
        **OF_PREPARE,
    )
    how: dict[str, Any] = {"task": options.task, "limit": 64, "batch_size": 8, "teacher_forced": False}
    full, row = skipdecode.evaluate(str(tuned.path), options.data, out=folder / "eval", overwrite=True, **how).rows
    depth = " to ".join(map(str, dict.fromkeys((schedule.budgets[0], schedule.budgets[-1]))))
    about = {"recipe": name, "layers": [len(schedule.prompt_layers()), depth], "schedule": schedule.to_dict()}
    about |= {"tokens": tuned.result["tokens"], "full_depth_scores": full["scores"]}
    return about | {key: row[key] for key in ("request_speedup", "request_speedup_alone", "scores", "copied")}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("run", type=Path, help="the --out of prepare")
    parser.add_argument("--task", required=True)
    parser.add_argument("--data", required=True, help="records to evaluate on")
    parser.add_argument("--new-tokens", type=int, default=29, help="mean length of an answer")
    parser.add_argument("--minutes", type=float, default=6.0, help="of tuning, for each recipe")
    parser.add_argument("--work", type=Path, required=True, help="directory of the runs")
    options = parser.parse_args()
    calibration = json.loads((options.run / "fit" / "calibration.json").read_text(encoding="utf-8"))
    prepared = json.loads((options.run / "prepared.json").read_text(encoding="utf-8"))
    best = next(row["scores"] for row in prepared["rows"] if row["full_depth"])
    cost = CostModel.from_dict(calibration["cost"])
    text = cost.text(calibration["prompt_len"], options.new_tokens, whole=True)
    loaded = skipdecode.load(str(options.run / "full"))
    model = replace(loaded, model=merge_adapter(loaded.model))
    rows: list[dict[str, Any]] = []
    for name, schedule in recipes(calibration, text).items():
        row = measured(model, options.run, name, schedule, options)
        rows.append(row | {"kept": min(row["scores"][metric] / score for metric, score in best.items())})
        write_result(options.out, "recipes", {"minutes": options.minutes, "full_depth": best, "rows": rows}, options)


if __name__ == "__main__":
    main()
