"""Verbs and flags of earlier versions, each with the text that names what to use instead."""

from __future__ import annotations

from skipdecode.errors import UsageError

_OF_PYTHON = {
    "prepare": "fit-records fit-tokens max-length order-records",
    "tune": "accumulation clip fit-learning-rate gradient-checkpointing no-gradient-checkpointing lora-alpha "
    "lora-dropout max-length temperature teacher-top-k train-fit no-train-fit warmup-fraction weight-decay",
}
RETIRED = {
    **{
        f"{verb} --{name}": f"it is an option of skipdecode.{verb} in Python, and in tune's --recipe FILE: "
        f"{name.removeprefix('no-').replace('-', '_')}"
        for verb, names in _OF_PYTHON.items()
        for name in names.split()
    },
    **dict.fromkeys(
        (f"plan --{name}" for name in ("order", "warmup-layers", "min-exit-layer", "max-exit-layer", "spread")),
        "Schedule.paper and Schedule.reordered in Python write such a schedule, for --schedule FILE",
    ),
    **dict.fromkeys(
        ("eval --drop-order", "eval --warmup-layers"),
        "write a schedule file, for --schedule (Schedule.from_speedup(…, drop_order=…, warmup_layers=…).save(FILE))",
    ),
    "--nominal-speedup": "the schedule names it: --schedule 2x",
    "--prompt-layers": "they stand behind the schedule: --schedule 2x:p15 (or :p15 alone)",
    "--flat": "it stands behind the schedule: --schedule 2x:flat",
    "--augment-names": "benchmarks/invented_names.py writes a file of records with invented names, for --train",
    "--router": "a fixed schedule is the better choice (generate and serve take one with --schedule)",
    "bench": "generate --compare and eval measure the speed-up of a schedule, benchmarks/speed.py engines",
    "calibrate": "skipdecode prepare --minutes 0 chooses layers and evaluates; skipdecode.calibrate has all settings",
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
    "generate --restart": "delete FILE.partial of the interrupted run",
    "info --json": "info always prints JSON",
    "plan --use": "--flat plans for continuous batching",
    "plan --png": "the printed plan shows the layers; prepare and skipdecode.calibrate write pictures",
    "plan --measure": "plan always times the model; --remeasure times it again",
    "plan --no-measure": "plan always times the model, once; the times are kept for later commands",
    "report": "eval prints its tables in Markdown (--compare: of finished runs); prepare and tune write pictures",
    "simulate": "skipdecode plan predicts the speed of a schedule; benchmarks/serve_load.py measures a server",
    "tune --compare-batches": "leave it out: tune measures no speed of training at full depth",
    "tune --curriculum-fraction": "tune runs the schedule, or those of --sampled-speedups, from the first step",
    "tune --curriculum": "--sampled-speedups 1 2 3 alone samples these speed-ups beside the schedule",
    "tune --teacher": "the model before tuning, at full depth, teaches",
    "tune --tensorboard": "OUT/log.jsonl has the losses of every step, and OUT/loss.png shows them",
    "tune --train-records": "give --train a file with fewer lines (head -n N FILE)",
}
"""By the name of a verb, of a flag of any verb (`--flag`), or of a flag of one verb (`verb --flag`)."""


def refuse_retired(verb: str, flag: str | None = None) -> None:
    """Raise UsageError, with the replacement, if the verb or the verb's flag was removed."""
    for name in (verb,) if flag is None else (f"{verb} {flag}", flag):
        if name in RETIRED:
            raise UsageError(f"{name} was removed: {RETIRED[name]}")
