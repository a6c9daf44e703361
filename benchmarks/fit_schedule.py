"""The fit of given schedules: bridges, and keys and values of prompts, from records with responses.

    python benchmarks/fit_schedule.py runs/tuned order.json --nominal-speedups 3 --seq-len 41 --prompt-layers 10 \\
      --task e2e --data answers.jsonl --augment-names mr --out runs/fit

`skipdecode.calibrate` fits what it finds; this script fits the paper's schedules of nominal speed-ups with the drop
order of a given schedule and the lowest layers for prompts. The fit and the schedules go to --out, for
`skipdecode tune --schedule`. --keep-bridges replaces the prompt maps of a tuned checkpoint alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from invented_names import with_invented_names
from shared import script_parser

from skipdecode import Schedule
from skipdecode.data.batches import Batch, collate
from skipdecode.data.examples import Example, encode_examples, read_file
from skipdecode.data.tasks import load_task
from skipdecode.learning.fitting import Fitter
from skipdecode.learning.settings import FitOptions
from skipdecode.models.carried import FIT_FILE
from skipdecode.models.fit import Fit
from skipdecode.models.loading.base_weights import base_sample
from skipdecode.models.loading.hub import load_model

BATCH = 8


def batches_of(examples: Iterable[Example]) -> list[Batch]:
    """Aligned batches, records of like length together, in an order that mixes lengths."""
    records = sorted(examples, key=lambda e: (len(e.prompt), len(e.response)))
    groups = [records[first : first + BATCH] for first in range(0, len(records), BATCH)]
    random.Random(0).shuffle(groups)
    return [collate(group) for group in groups]


def save_fit(out: Path, model: Any, fit: Fit, schedules: Sequence[Schedule]) -> None:
    """Write a fit, with a sample of its weights, and its schedules by their names."""
    fit.about["base"] = base_sample(model)
    out.mkdir(parents=True, exist_ok=True)
    fit.save(out / FIT_FILE)
    for schedule in schedules:
        schedule.save(out / f"{schedule.name}.json")


def main() -> None:
    """Fit and write."""
    parser = script_parser(__doc__, result="directory for the fit and the schedule")
    parser.add_argument("checkpoint")
    parser.add_argument("order", type=Path, help="schedule whose drop order is taken")
    parser.add_argument("--prompt-layers", type=int, required=True)
    parser.add_argument("--nominal-speedups", type=float, nargs="+", required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--data", required=True, help="JSONL file of records with responses")
    parser.add_argument("--records", type=int, default=300)
    parser.add_argument("--augment-names", nargs="*", default=[], help="--fields of invented_names.py, one copy each")
    parser.add_argument("--fit-taps", type=int, default=0, help="as of skipdecode.calibrate")
    parser.add_argument("--keep-bridges", action="store_true", help="those of the checkpoint, in place of new ones")
    given = parser.parse_args()
    task, order, schedules = load_task(given.task), Schedule.load(given.order), []
    for speedup in given.nominal_speedups:
        name = f"{task.name}-{speedup:g}x-p{given.prompt_layers}"
        budgets = Schedule.from_speedup(order.num_layers, speedup, given.seq_len).budgets
        schedules.append(Schedule(order.num_layers, order.drop_order, budgets, 1, range(given.prompt_layers), name))
    loaded, template = load_model(given.checkpoint, dtype="float32"), task.template()
    file = read_file(given.data, template, limit=given.records, skip_bad=True)
    file = replace(file, records=tuple(with_invented_names(file.records, template, given.augment_names, seed=5)))
    tokenizer: Any = loaded.tokenizer
    examples, _ = encode_examples(file, template, tokenizer, max_length=None, skip_bad=True)
    fitter = Fitter(loaded.model, batches_of(examples), FitOptions(fit_taps=given.fit_taps))
    if given.keep_bridges:
        fit = fitter.fit([replace(schedules[0], budgets=(order.num_layers,))])  # skips nothing: prompt maps alone
        fit.bridges = Fit.load(Path(given.checkpoint) / FIT_FILE).bridges
    else:
        fit = fitter.fit(schedules)
    save_fit(given.out, loaded.model, fit, schedules)


if __name__ == "__main__":
    main()
