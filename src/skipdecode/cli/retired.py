"""Verbs and flags of earlier versions, each with the text that names what to use instead."""

from __future__ import annotations

from skipdecode.errors import UsageError

_OF_PYTHON = {
    "prepare": ("fit_records", "fit_tokens", "max_length", "order_records"),
}
_OF_RECIPES = (
    *("accumulation", "clip", "fit_learning_rate", "gradient_checkpointing", "lora_alpha", "lora_dropout"),
    *("max_length", "temperature", "teacher_top_k", "train_fit", "warmup_fraction", "weight_decay"),
)
_FUNCTIONS = {"eval": "evaluate"}


def _flags(verb: str, name: str) -> list[str]:
    """The names of an option's flags in `RETIRED`."""
    dashed = name.replace("_", "-")
    return [
        f"{verb} --{dashed}",
        *([f"{verb} --no-{dashed}"] if name in ("train_fit", "gradient_checkpointing") else []),
    ]


RETIRED = {
    "--nominal-speedup": "the schedule names it: --schedule 2x",
    "--prompt-layers": "they stand behind the schedule: --schedule 2x:p15 (or :p15 alone)",
    "--flat": "it stands behind the schedule: --schedule 2x:flat",
    "--augment-names": "benchmarks/invented_names.py of the source repository writes a file of records with invented "
    "names, for --train",
    "--router": "a fixed schedule is the better choice (generate and serve take one with --schedule)",
    "bench": "generate --compare and eval measure the speed-up of a schedule; benchmarks/speed.py of the source "
    "repository measures engines next to the limit of the machine",
    "eval --drop-order": "write a schedule file with another drop order, for --schedule and --methods "
    "(Schedule.from_speedup(..., drop_order=...).save(FILE))",
    "calibrate": "skipdecode prepare --minutes 0 chooses layers and evaluates them (the schedule and its fit are in "
    "OUT/fit); skipdecode.calibrate in Python has all settings",
    "demo --quick": "give --max-new-tokens 8",
    "demo --rounds": "the demo always takes medians of three rounds",
    "eval --exact": "generate --exact --compare measures its speed; its outputs are those of full depth",
    "eval --no-self": "give --task or --data",
    "eval --report": "the printed tables are Markdown: write them to a file with > FILE.md",
    "eval --self": "without --task and --data, eval compares the texts of the schedules with those of the base model",
    "eval --self-records": "give --limit",
    "eval --self-temperature": "give --temperature",
    "eval --self-tokens": "give --max-new-tokens",
    "eval --self-top-p": "give --top-p",
    "eval --warmup-layers": "write a schedule file, for --schedule and --methods "
    "(Schedule.from_speedup(..., warmup_layers=...).save(FILE))",
    "generate --restart": "delete FILE.partial of the interrupted run",
    "plan --use": "--flat plans for continuous batching",
    **{
        f"plan --{name}": "Schedule.paper and Schedule.reordered in Python write such a schedule, for --schedule FILE"
        for name in ("order", "warmup-layers", "min-exit-layer", "max-exit-layer", "spread")
    },
    "plan --png": "the printed plan shows the layers; prepare and skipdecode.calibrate write pictures",
    "plan --measure": "plan always times the model; --remeasure times it again",
    "plan --no-measure": "plan always times the model, once; the times are kept for later commands",
    "report": "skipdecode eval prints its tables in Markdown (--compare: those of finished runs); prepare and "
    "tune write their pictures as PNG files into --out",
    "simulate": "skipdecode plan predicts the speed of a schedule; the scripts in benchmarks/ of the source repository "
    "measure throughput and latency (serve_load.py for a server)",
    "tune --compare-batches": "leave it out: tune measures no speed of training at full depth",
    "tune --curriculum-fraction": "tune runs the schedule, or those of --sampled-speedups, from the first step",
    "tune --curriculum": "--sampled-speedups 1 2 3 alone samples these speed-ups beside the schedule",
    "tune --teacher": "the model before tuning, at full depth, teaches",
    "tune --train-records": "give --train a file with fewer lines (head -n N FILE)",
    **{
        flag: f"it is an option of skipdecode.tune in Python ({name}=…), and of a recipe: --recipe FILE with "
        f'{{"options": {{"{name}": …}}}}'
        for name in _OF_RECIPES
        for flag in _flags("tune", name)
    },
    **{
        flag: f"it is an option of skipdecode.{_FUNCTIONS.get(verb, verb)} in Python ({name}=…)"
        for verb, names in _OF_PYTHON.items()
        for name in names
        for flag in _flags(verb, name)
    },
    "tune --tensorboard": "OUT/log.jsonl has the losses of every step, and OUT/loss.png shows them",
}
"""By the name of a verb, of a flag of any verb (`--flag`), or of a flag of one verb (`verb --flag`)."""


def refuse_retired(verb: str, flag: str | None = None) -> None:
    """Raise UsageError, with the replacement, if the verb or the verb's flag was removed."""
    for name in (verb,) if flag is None else (f"{verb} {flag}", flag):
        if name in RETIRED:
            raise UsageError(f"{name} was removed: {RETIRED[name]}")
