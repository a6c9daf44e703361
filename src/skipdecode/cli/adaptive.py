"""`skipdecode calibrate --adaptive`: what depth by difficulty would gain, then what gets a part of it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from skipdecode.cli.arguments import flag
from skipdecode.cli.calibrate import draw, load, measuring
from skipdecode.cli.columns import figures
from skipdecode.cli.options.records import check_records
from skipdecode.common.progress import note
from skipdecode.engine.depth import WAYS
from skipdecode.errors import UsageError
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skipdecode.calibration.adaptive import DepthTable
    from skipdecode.cli.calibrate import Config
    from skipdecode.engine.adaptive import Router
    from skipdecode.models.loading.hub import LoadedModel
    from skipdecode.performance.cost import CostModel

__all__ = ["run"]

_LEAST_GAIN = 0.01  # nats a token: less is not worth a router
_OF_SCHEDULES = ("prompt_depths", "use", "method", "candidates", "least", "buckets", "warmup_layers", "seq_len")
_COLUMNS = {
    "method": "{method}",
    "records": "{task}: {n}",
    "request speed-up": "{request_speedup:.2f}x",
    "mean layers": "{mean_layers:.1f}",
    "loss": "{loss:.4f}",
    "static": "{static:.4f}",
    "gain": "{gain:+.4f}",
    "95% of draws": "{low:+.4f} to {high:+.4f}",
}


def run(config: Config, cost: CostModel | None) -> int:
    """Measure, print the oracle, and where it gains, make and print what gets a part of it."""
    from skipdecode.calibration.adaptive import oracle
    from skipdecode.engine.adaptive import ROUTER_FILE, identity

    speedup = config.target_speedup
    if speedup is None or config.phase != "request":
        raise UsageError("--adaptive compares at equal time of requests: give --target-speedup, and no --phase decode")
    if unused := next((n for n in _OF_SCHEDULES if getattr(config, n) != getattr(type(config), n)), None):
        raise UsageError(f"--adaptive learns no schedule, and takes those of --depths: leave out {flag(unused)}")
    parts = _parts(config)
    loaded = load(config)
    depths, model = _depths(config, loaded), identity(loaded.model)
    table = _table(config, cost, loaded, depths, parts)
    possible = oracle(table, speedup)
    gained = possible[0]["gain"] >= _LEAST_GAIN and possible[0]["low"] > 0
    runs, router = _learned(table, speedup, model) if gained else ([], None)
    document = {"oracle": possible, "runs": runs}
    place = Path(config.out) / ROUTER_FILE
    if router is not None:
        router.save(place, figures=document)
    print(json.dumps(document) if config.json else _report(config, depths, document, place))
    return 0


def _parts(config: Config) -> dict[str, Config]:
    """The records of each task, checked as far as can be without a model."""
    alone = replace(config, prompt_template=None, prompt_field=None, response_field=None, chat=False, held_out=0)
    parts = {Path(config.task or "data").stem: replace(config, held_out=0)}
    for word in config.mixture:
        task, equals, file = word.partition("=")
        if not equals or (name := Path(task).stem) in parts:
            raise UsageError(f"--mixture {word}: give TASK=FILE, each task once")
        parts[name] = replace(alone, task=task, data=file)
    for part in parts.values():
        check_records(part, "data")
    return parts


def _depths(config: Config, loaded: LoadedModel) -> list[Schedule]:
    """The deepest first: flat ones of --depths, or those that the weights were tuned under."""
    from skipdecode.engine.adaptive import check_depths

    layers, tuned = loaded.num_layers, () if loaded.recipe is None else loaded.recipe.tuned_under
    base = next((each for each in (loaded.schedule, *tuned) if each is not None and each.drop_order), None)
    base = base or Schedule(layers, tuple(range(1, layers - 1)), (layers,))
    flat = [replace(base, budgets=(n,), name=f"flat-{n}") for n in config.depths]
    alike = (each for each in tuned if each.is_full or each.prompt_layers() == base.prompt_layers())
    found = flat or [replace(base, budgets=(layers,), name="full") if each.is_full else each for each in alike]
    if len(found) < 2:
        raise UsageError("depths to choose from are needed, which this checkpoint does not say: --depths 30 20 15, say")
    found.sort(key=lambda each: -each.mean_budget())
    check_depths(found)
    return found


def _table(
    config: Config, cost: CostModel | None, loaded: LoadedModel, depths: Sequence[Schedule], parts: dict[str, Config]
) -> DepthTable:
    from skipdecode.calibration.adaptive import DepthTable
    from skipdecode.performance.cost_source import find_cost

    examples = {task: draw(part, loaded)[0] for task, part in parts.items()}
    prompt_len = round(median(len(e.prompt) for rows in examples.values() for e in rows))
    cost = cost or find_cost(config.model, batch=config.batch, prompt_len=prompt_len).cost
    with measuring(config, loaded, examples) as (_, meters, bar):
        bar.reset(total=sum(meter.batches for meter in meters.values()))
        return DepthTable(depths, meters, cost)


def _learned(table: DepthTable, speedup: float, model: dict[str, Any]) -> tuple[list[dict[str, Any]], Router]:
    """What a router and thresholds gain, and the router."""
    from skipdecode.calibration.adaptive import NEVER, find_router, find_thresholds, follow, penalties, routed
    from skipdecode.engine.adaptive import Router

    weights, predicted = find_router(table)
    choice, _ = routed(table, predicted, speedup)
    runs, thresholds = table.chosen(WAYS[0], choice), find_thresholds(table, speedup)
    if thresholds is None:
        note("no thresholds of confidence reach the target: rows stay at their first depth")
    for way, begun in ((WAYS[1], choice * 0), (WAYS[2], choice)) if thresholds else ():
        runs += table.compare(way, *follow(table, thresholds or (), begun))
    router = Router(
        depths=table.depths,
        costs=tuple(table.costs.tolist()),
        weights=tuple(map(tuple, weights.tolist())),
        penalties=tuple(penalties(table, predicted)),
        speedup=speedup,
        thresholds=thresholds or (NEVER,) * (len(table.depths) - 1),
        model=model,
    )
    return runs, router


def _report(config: Config, depths: Sequence[Schedule], document: dict[str, Any], place: Path) -> str:
    possible, runs = document["oracle"], document["runs"]
    lines = [
        "depths: " + ", ".join(f"{depth.name} ({depth.mean_budget():.1f} layers)" for depth in depths),
        "loss per response token; static: of the best depth, or mix of two, that takes as long",
        "",
        *figures(_COLUMNS, [*possible, *runs], absent=""),
        "",
        "the oracle, which knows all losses, gains {gain:+.4f} ({low:+.4f} to {high:+.4f})".format_map(possible[0]),
    ]
    if not runs:
        return "\n".join([*lines[:-1], f"{lines[-1]}: too little, or within chance, so no router was made"])
    sure = [each["method"] for each in runs if each["task"] == "all" and each["low"] > 0]
    way = sure[0] if sure else WAYS[0]
    use = ["skipdecode", "generate", config.model, "--schedule", way, "--router", str(place)]
    use += ["--input", "prompts.jsonl"]
    lines += [f"ahead of static beyond chance: {', '.join(sure) or 'none, so a static depth is the better choice'}"]
    lines += [f"next: {shlex.join(use)}", "beside the weights the file is found without --router"]
    return "\n".join(lines)
