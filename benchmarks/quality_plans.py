"""What the published quality tables are made of: models, tasks, schedules, checkpoints. `quality_runs.py` runs it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from skipdecode import Schedule

TASKS = Path(__file__).parent / "tasks"
CALIBRATED = ("calibrated", "pruned")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint starts from, what it is tuned with, and the methods it is evaluated with.

    Words that end in .json are schedules by name, such as even-3x.json. `averaged`: another checkpoint, and its share
    of the weights that tuning starts from. `answers`: the checkpoint whose answers it is tuned on, in place of the
    references. `preset`: a file of presets/, in place of base and options. `train`: the file of records, beside
    dev.jsonl. `carries`: what an adapter carries in place of its target.
    """

    base: str
    options: Sequence[str]
    methods: Sequence[str]
    averaged: tuple[str, float] | None = None
    answers: str = ""
    preset: str = ""
    train: str = "train.jsonl"
    carries: str = ""


@dataclass(frozen=True)
class Plan:
    """One table, in the file `results` of results/, whose directories begin with `prefix`.

    `start`, the checkpoint tuned for full depth that all others go on from, is tuned from `model`, which has `layers`;
    the calibration runs on its weights. `seq_len`: 95th percentile of the training responses' lengths, in tokens.
    `speedups`: nominal, rising. `checkpoints` are made in their order; all runs are compared with the full depth of the
    checkpoint `yardstick`. `task`: name or file. `common`, `evaluation`, `calibration` and `timing`: options of every
    `skipdecode tune`, `skipdecode eval` and `calibrate.py` (none where no schedule is learned), and of the timing in
    batches. `request`: also time requests one by one, and full depth through transformers. `beside`: file of an earlier
    table in results/, whose schedules are timed in the same run and whose rows are shown too.
    """

    prefix: str
    results: str
    model: str
    layers: int
    seq_len: int
    speedups: Sequence[int]
    checkpoints: Mapping[str, Checkpoint]
    yardstick: str
    common: Sequence[str] = field(default=("--batch-size", "16", "--learning-rate", "3e-4", "--dev-records", "128"))
    evaluation: Sequence[str] = field(default=("--batch-size", "32"))
    task: str = "e2e"
    start: str = "full-a"
    calibration: Sequence[str] = ("--least", "3", "--batch-size", "32")
    timing: Sequence[str] = ()
    request: bool = False
    beside: str = ""

    @property
    def speeds(self) -> str:
        """Name of its times."""
        return f"request-{self.prefix}" if self.request else self.prefix

    def schedule(self, name: str, speedup: float) -> Schedule:
        """A schedule that needs no calibration, by the name of its method."""
        deepest = Schedule.from_speedup(self.layers, self.speedups[-1], self.seq_len)
        if name == "static":
            # The same layers for the prompt and the answer, at every position.
            count = round(self.layers / speedup)
            return Schedule.constant(self.layers, count, drop_order=self.learned, prompt="max_exit")
        if name.startswith("pop"):
            return replace(Schedule.full(self.layers), prompt=range(int(name.removeprefix("pop"))))
        linear = Schedule.from_speedup(self.layers, speedup, self.seq_len)
        if name == "learned":
            return replace(linear, drop_order=self.learned)
        if split := re.fullmatch(r"(lower|paper|even)(\d+)", name):
            # The prompt runs the lower layers, the answer those of an order: of the calibrated one, if none is named.
            order = "learned" if split[1] == "lower" else split[1]
            return replace(self.schedule(order, speedup), prompt=range(int(split[2])))
        if name in ("even", "early_termination"):
            return replace(linear, drop_order=deepest.reordered("even" if name == "even" else "top-down").drop_order)
        if name == "unified":
            # The layers that the even order was tuned with, the same at every position.
            order = deepest.reordered("even").drop_order
            return Schedule.constant(self.layers, round(self.layers / speedup), drop_order=order)
        if name == "d3":
            return replace(linear, budgets=power_law(self.layers, speedup, self.seq_len), name="", family="d3")
        if name.startswith("warmup"):
            layers = int(name.removeprefix("warmup"))
            return Schedule.from_speedup(self.layers, speedup, self.seq_len, warmup_layers=layers)
        others = {
            "paper": linear,
            "flat": Schedule.constant(self.layers, int(self.layers / speedup)),
            "max_exit": replace(linear, prompt="max_exit"),
            "median": Schedule.from_speedup(self.layers, speedup, E2E_MEDIAN),
        }
        return others[name]

    @property
    def learned(self) -> tuple[int, ...]:
        """The published drop order that was calibrated for the task's highest speed-up."""
        files = sorted((TASKS.parents[1] / "results").glob(f"calibration-{self.prefix}-*-*x.json"))
        return tuple(json.loads(files[-1].read_text(encoding="utf-8"))["schedule"]["drop_order"])

    def calibrated(self, found: Schedule, speedup: int) -> Mapping[str, Schedule]:
        """What a calibrated schedule gives: its order under the paper's depths, and at one depth."""
        linear = Schedule.from_speedup(self.layers, speedup, self.seq_len)
        flat = Schedule.constant(self.layers, round(self.layers / speedup), drop_order=found.drop_order)
        schedules = (replace(linear, drop_order=found.drop_order), flat)
        return dict(zip(CALIBRATED, schedules, strict=True))


def power_law(layers: int, speedup: float, seq_len: int) -> tuple[int, ...]:
    """Budgets of D3: a power law whose mean is `layers` / `speedup`; bisection finds the base."""

    def budgets(base: float) -> tuple[int, ...]:
        return tuple(max(2, round(layers * base**i)) for i in range(seq_len))

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(budgets(middle)) < layers / speedup * seq_len else (low, middle)
    return budgets(high)


def files(name: str, *speedups: int) -> list[str]:
    """The schedules of a method, one for each speed-up."""
    return [f"{name}-{speedup}x.json" for speedup in speedups]


def tuned(schedule: str, second: Sequence[str], methods: Sequence[str]) -> Checkpoint:
    """Tuned on from the start, under a schedule and what is sampled beside it."""
    return Checkpoint("full-a", ["--schedule", f"{schedule}.json", *second], methods)


def sampled(steps: int, *speedups: int) -> list[str]:
    """One checkpoint for several speed-ups: that of its schedule and these."""
    return [*("--steps", str(steps), "--distill-weight", "0.5"), *("--sampled-speedups", *map(str, speedups))]


def full_depth(base: str, seq_len: int, steps: int) -> Checkpoint:
    """Tuned for full depth."""
    options = ["--schedule", "1x", "--seq-len", str(seq_len), "--steps", str(steps)]
    return Checkpoint(base, options, ["full"])


E2E_SEQ_LEN, E2E_MEDIAN = 41, 25
_ALL = (2, 3, 4, 5)
_SECOND = sampled(450, 2, 3, 4)
# Deep cuts and full depth twice as often as 2x, each depth with full and with split prompts.
_ANY_SPEED = [*("--sampled-speedups", *"1123355", "--sampled-prompts", "10"), *("--dev-records", "64")]
_ANY_METHODS = ["full", *files("learned", 2, 3, 5), *files("lower10", 2, 3, 5)]
_TAUGHT = ["--steps", "450", "--distill-weight", "0.5"]
_SHORT = ["--steps", "50", "--distill-weight", "0.5"]
_ABLATED = ("paper", "warmup0", "warmup2", "warmup4", "flat", "max_exit", "median")

_SMOLLM2 = {"model": "smollm2-135m", "layers": 30}
_E2E = {**_SMOLLM2, "seq_len": E2E_SEQ_LEN, "speedups": _ALL}
_E2E_START = full_depth("", E2E_SEQ_LEN, 300)

# At 3x, one schedule a checkpoint, 50 steps: what each setting of the paper's schedule is worth.
_ABLATIONS = {f"3x-{name}": tuned(f"{name}-3x", _SHORT, [f"{name}-3x.json"]) for name in _ABLATED}
_ABLATIONS["3x-plain"] = tuned("paper-3x", _SHORT[:2], ["paper-3x.json"])


def _summaries(prefix: str, seq_len: int, steps: tuple[int, int], rate: str) -> Plan:
    """A small table of a summarization task, whose prompts lose their ends to fit a small machine."""
    second = sampled(steps[1], 2)
    orders = {"paper": "paper", "cal": "calibrated", "even": "even"}
    made = {f"{short}-b": tuned(f"{order}-3x", second, files(order, 2, 3)) for short, order in orders.items()}
    return Plan(
        prefix,
        f"{prefix}-smollm2-135m.json",
        **_SMOLLM2,
        seq_len=seq_len,
        speedups=(2, 3),
        checkpoints={"full-a": full_depth("", seq_len, steps[0]), **made},
        yardstick="full-a",
        common=("--batch-size", "8", "--learning-rate", rate, "--dev-records", "64"),
        evaluation=("--batch-size", "16"),
        task=str(TASKS / f"{prefix}.yaml"),
        calibration=("--least", "6", "--records", "12", "--held-out", "12", "--candidates", "3", "--batch-size", "12"),
    )


_OWN = ["--steps", "450"]  # one schedule a checkpoint, from full depth's weights, without a teacher


def requested(*words: str) -> dict[str, Checkpoint]:
    """Checkpoints of their own for the schedules of request time, by names such as lower15-3x."""
    return {word: tuned(word, _OWN, [f"{word}.json"]) for word in words}


def _summary_requests(
    plan: Plan, words: Sequence[str], steps: int, settled: int = 0, orders: Sequence[str] = ()
) -> Plan:
    """Request time of the same task: schedules by name, each tuned from full depth; and one checkpoint for several.

    That one is tuned for `steps` on the answers of full depth, which may take `settled` more steps first; one more
    for each of `orders`, in place of the calibrated one.
    """
    made = {"full-a": plan.checkpoints["full-a"]}
    made |= {word: tuned(word, ["--steps", "120"], [f"{word}.json"]) for word in words}
    teacher = "full-b" if settled else "full-a"
    if settled:
        more = full_depth("full-a", plan.seq_len, settled)
        made["full-b"] = replace(more, options=[*more.options, "--seed", "1", "--eval-every", "40"])
    options = [
        *("--steps", str(steps), "--learning-rate", "3e-4", "--distill-weight", "1.0"),
        *("--sampled-speedups", "2", "--sampled-prompts", "12"),
        *("--eval-every", "100"),
    ]
    splits = {"any": ("learned", "lower12"), **{f"any-{order}": (order, f"{order}12") for order in orders}}
    for name, (order, split) in splits.items():
        methods = [*files(order, 2, 3), *files(split, 2, 3)]
        made[name] = Checkpoint(teacher, ["--schedule", f"{order}-3x.json", *options], methods, answers=teacher)
    return replace(
        plan,
        results=f"request-{plan.results}",
        checkpoints=made,
        yardstick=teacher,
        calibration=(),
        timing=("--limit", "64"),
        request=True,
    )


_CNN_DM, _TLDR = _summaries("cnn_dm", 71, (80, 60), "2e-4"), _summaries("tldr", 70, (80, 120), "3e-4")

PLANS = {
    "e2e": Plan(
        "e2e",
        "e2e-smollm2-135m.json",
        **_E2E,
        checkpoints={
            "full-a": _E2E_START,
            "paper-b": tuned("paper-5x", _SECOND, ["full", *files("paper", *_ALL), *files("d3", 3, 5)]),
            "cal-b": tuned("calibrated-5x", _SECOND, ["full", *files("calibrated", *_ALL), *files("pruned", 3, 5)]),
            "even-b": tuned("even-5x", _SECOND, [*files("even", *_ALL), *files("unified", 3, 5)]),
            "full-b": replace(full_depth("full-a", E2E_SEQ_LEN, 450), methods=["full"]),
            "top-b": tuned("early_termination-5x", _SECOND, files("early_termination", *_ALL)),
        },
        yardstick="full-b",
    ),
    "request": Plan(
        "e2e",
        "request-e2e-smollm2-135m.json",
        **_E2E,
        checkpoints={
            "full-a": _E2E_START,
            "full-b": replace(full_depth("full-a", E2E_SEQ_LEN, 450), methods=["full", "pop20-1x.json"]),
            **requested(
                "lower15-3x", "lower10-3x", "lower9-3x", "lower7-4x", "lower10-5x", "static-2.7x", "max_exit-3x"
            ),
        },
        yardstick="full-b",
        calibration=(),
        request=True,
        beside="own-smollm2-135m.json",
    ),
    "any-speed": Plan(
        "e2e",
        "any-speed-e2e-smollm2-135m.json",
        **_E2E,
        checkpoints={
            "full-a": _E2E_START,
            "full-b": replace(full_depth("full-a", E2E_SEQ_LEN, 450), methods=["full"]),
            "any-a": tuned("learned-3x", ["--steps", "600", "--eval-every", "120", *_ANY_SPEED], ()),
            "any-b": Checkpoint(
                "any-a",
                [
                    *("--schedule", "learned-3x.json", "--steps", "300", "--learning-rate", "2e-4", "--seed", "1"),
                    *_ANY_SPEED,
                ],
                ["full", "lower10-5x.json"],
                averaged=("full-b", 0.3),
            ),
            "any": Checkpoint(
                "any-b",
                [
                    *("--schedule", "learned-5x.json", "--steps", "700", "--eval-every", "100", "--seed", "2"),
                    *("--sampled-speedups", *"12335", "--sampled-prompts", "10"),
                ],
                _ANY_METHODS,
                answers="full-b",
            ),
            # The demo's.
            "adapter": Checkpoint(
                "",
                (),
                ["full", *files("lower10", 2, 3, 5)],
                answers="full-b",
                preset="first-e2e-smollm2-135m.json",
                train="named.jsonl",
                carries="e2e-p30-3x",
            ),
        },
        yardstick="full-b",
        calibration=(),
        request=True,
    ),
    "ablations": Plan(
        "e2e",
        "ablations-smollm2-135m.json",
        **_E2E,
        checkpoints={"full-a": _E2E_START, **_ABLATIONS},
        yardstick="full-a",
        calibration=(),
    ),
    "own": Plan(
        "e2e",
        "own-smollm2-135m.json",
        **_E2E,
        # As many steps as full depth had, for one schedule each.
        checkpoints={
            f"{short}-{speedup}x": tuned(f"{order}-{speedup}x", _TAUGHT, files(order, speedup))
            for short, order in (("even", "even"), ("cal", "calibrated"))
            for speedup in (2, 3, 5)
        },
        yardstick="full-b",
    ),
    "cnn_dm": _CNN_DM,
    "tldr": _TLDR,
    "request-cnn_dm": _summary_requests(_CNN_DM, ["lower12-2x", "static-2.3x"], 300),
    "request-tldr": _summary_requests(_TLDR, [], 400, settled=120, orders=("paper", "even")),
    "gemma3": Plan(
        "gemma3",
        "e2e-gemma3-270m.json",
        model="gemma3-270m",
        layers=18,
        seq_len=E2E_SEQ_LEN,
        speedups=(2, 3),
        checkpoints={
            "full-a": full_depth("", E2E_SEQ_LEN, 200),
            "any": Checkpoint(
                "full-a",
                [
                    *("--schedule", "even-3x.json", "--steps", "150", "--eval-every", "100", "--seed", "2"),
                    *("--sampled-speedups", *"123", "--sampled-prompts", "6"),
                ],
                ["full", *files("even", 2, 3), *files("even6", 2, 3)],
                answers="full-a",
            ),
        },
        yardstick="full-a",
        common=("--batch-size", "16", "--learning-rate", "3e-4", "--dev-records", "64"),
        calibration=(),
        timing=("--limit", "64"),
        request=True,
    ),
}
