"""`skipdecode calibrate --router`: what choosing among schedules for each request gains, and the router that does."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from skipdecode.calibration.settings import CalibrationSettings
from skipdecode.cli.arguments import flag
from skipdecode.cli.calibrate import draw, load, measuring
from skipdecode.cli.options.records import encode_file, make_template, read_files
from skipdecode.errors import UsageError
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from skipdecode.cli.calibrate import Config
    from skipdecode.data.prompts import Example
    from skipdecode.engine.router import Measured, Routed
    from skipdecode.models.loading.hub import LoadedModel
    from skipdecode.performance.cost import CostModel

__all__ = ["run"]

_FILE = "router.json"
_USED = ("target_speedup", "batch_size")


def run(config: Config, cost: CostModel | None) -> int:
    """Measure the schedules, make the router, write and print."""
    from skipdecode.engine.router import fit_router
    from skipdecode.models.families import unwrap
    from skipdecode.models.loading.base_weights import base_sample

    if config.target_speedup is None:
        raise UsageError("--router compares schedules at equal time: give --target-speedup, not --nominal-speedup")
    settings = (field.name for field in fields(CalibrationSettings) if field.name not in _USED)
    if unused := next((name for name in settings if getattr(config, name) != getattr(type(config), name)), None):
        raise UsageError(f"--router learns no schedule: leave out {flag(unused)}")
    template = make_template(config)
    file = read_files(config, template, data=None)["data"]
    schedules = _schedules(config)
    loaded = load(config)
    examples, _ = encode_file(config, template, "data", file, loaded.model, loaded.tokenizer)
    examples, _ = draw(replace(config, held_out=0), examples)
    records = _measured(config, cost, loaded, schedules, examples)
    router, found = fit_router(schedules, records, config.target_speedup, base_sample(unwrap(loaded.model)))
    place = Path(config.out) / _FILE
    router.save(place)
    document = {"schedules": [schedule.name for schedule in schedules], **found._asdict()}
    print(json.dumps(document) if config.json else _report(config, schedules, found, place))
    return 0


def _schedules(config: Config) -> list[Schedule]:
    """Those of --router, the deepest first."""
    from skipdecode.engine.router import common_order

    ref = config.ref
    tuned = () if ref.recipe is None else ref.recipe.tuned_under
    known = {each.name: each for each in (*tuned, Schedule.full(ref.num_layers), ref.schedule) if each}
    found = [known[word] if word in known else _of_file(word, known) for word in config.router]
    if len(set(found)) < max(2, len(found)):
        raise UsageError(f"--router {' '.join(config.router)}: give two different schedules or more")
    common_order(found)
    return sorted(found, key=lambda each: -each.mean_budget())


def _of_file(word: str, known: dict[str, Schedule]) -> Schedule:
    if not Path(word).is_file():
        raise UsageError(f"--router {word}: no file, and this checkpoint knows {', '.join(known)} by name")
    return Schedule.load(word)


def _measured(
    config: Config, cost: CostModel | None, loaded: LoadedModel, schedules: list[Schedule], examples: list[Example]
) -> Measured:
    import numpy as np

    from skipdecode.engine.router import Measured, prompt_features
    from skipdecode.performance.cost_source import find_cost

    prompt_len = round(median(len(example.prompt) for example in examples))
    cost = cost or find_cost(config.ref, batch=config.batch, prompt_len=prompt_len).cost
    for schedule in schedules:
        schedule.check_fits(cost.num_layers)
    with measuring(config, loaded, {"router": examples}) as (_, meters, bar):
        bar.reset(total=len(schedules) * meters["router"].batches)
        found = meters["router"].by_record(schedules)
    features, every = prompt_features(loaded.model), [*schedules, Schedule.full(cost.num_layers)]
    sizes = [(len(example.prompt), max(2, len(example.response))) for example, _ in found]
    seconds = np.array([[cost.request_seconds(each, *size) for each in every] for size in sizes])
    return Measured(
        features=np.array([features(example.prompt) for example, _ in found]),
        losses=np.array([losses for _, losses in found]),
        seconds=seconds[:, :-1],
        tokens=np.array([float(len(example.response)) for example, _ in found]),
        full_seconds=seconds[:, -1],
    )


def _report(config: Config, schedules: list[Schedule], found: Routed, place: Path) -> str:
    shares = ", ".join(f"{each.name} {share:.0%}" for each, share in zip(schedules, found.shares, strict=True))
    pays = "" if found.low > 0 else ": within chance, so a static schedule is the better choice"
    use = ["skipdecode", "generate", config.model, "--router", str(place), "--input", "prompts.jsonl"]
    return "\n".join(
        [
            f"requests: {found.speedup:.2f}x by the cost model; {shares}",
            f"loss per response token {found.loss:.4f}; of the best schedule, or mix of two, in the same time "
            f"{found.static:.4f}",
            f"gain {found.gain:+.4f} ({found.low:+.4f} to {found.high:+.4f}){pays}",
            f"next: {shlex.join(use)}",
        ]
    )
