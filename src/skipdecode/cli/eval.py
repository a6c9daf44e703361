"""Measure quality, fidelity and speed of schedules; compare runs.

  skipdecode eval MODEL --task e2e --data test.jsonl --schedule 2x --out runs/2x
  skipdecode eval MODEL --task e2e --data test.jsonl --schedule 2x 3x:p15 mine.json --out runs
  skipdecode eval MODEL --out runs
  skipdecode eval --compare runs/full runs/2x

The first form generates an output for each record with the schedule and at full depth, scores both, and shows first the
share of full depth's scores that the schedule keeps. Speed is measured on a few batches, with the same output lengths
for both. It writes OUT/run.json and OUT/outputs.jsonl, and the same files for full depth in OUT/full.
After an interruption, the same command continues.
The second form evaluates several schedules, which share full depth; each has its own directory in OUT. All run on
the fast engine if it supports the model, else through transformers (--engine).
The third form, without --task and --data, needs no records: it measures the KL divergence from the base model, the base
model's perplexity on the texts of each schedule, and the share of instructions that are followed.
The fourth form compares finished runs with the first of them.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from skipdecode.cli.options.evaluation import Config, asked_schedules
from skipdecode.errors import UsageError
from skipdecode.evaluation.settings import EvaluationOptions

if TYPE_CHECKING:
    from skipdecode.evaluation.evaluate import Scores
    from skipdecode.generation.llm import LLM
    from skipdecode.models.loading.ref import ModelRef


def run(config: Config) -> int:
    """Evaluate or compare, and print."""
    if not config.compare:
        for value, name in ((config.model, "MODEL"), (config.out, "--out")):
            if not value:
                raise UsageError(f"{name} is missing (or give --compare with finished runs)")
    scores = _compared(config) if config.compare else _evaluated(config)
    if config.json:
        print(json.dumps(scores.document, indent=1))
        return 0
    print(scores)
    if not config.compare:
        print(
            "",
            *(
                f"{run.data.get('name', 'all schedules')}: {run.path}, {run.data['outputs']} beside it"
                for run in scores.runs
            ),
            sep="\n",
        )
    return 0


def _compared(config: Config) -> Scores:
    from skipdecode.evaluation.compare import compare_runs
    from skipdecode.evaluation.evaluate import Scores
    from skipdecode.evaluation.results import load_run

    runs = [load_run(path) for path in config.compare]
    return Scores(runs, compare_runs(runs, config.metrics, resamples=config.resamples, seed=config.seed))


def _evaluated(config: Config) -> Scores:
    from skipdecode.engine.loading import load
    from skipdecode.evaluation.evaluate import evaluate
    from skipdecode.generation.llm import LLM

    def opened(ref: ModelRef) -> LLM:
        loaded = config.load() if ref is config.ref else load(ref, dtype=config.dtype, device=config.device)
        return LLM(loaded, engine=config.engine, quantization=config.quantization)

    return evaluate(
        config.ref,
        config.data,
        asked_schedules(config),
        task=config.task or None,
        prompts=config.prompts,
        base=config.base if config.without_references else None,
        out=config.out,
        loader=opened,
        **asdict(config.part(EvaluationOptions)),
    )
