"""`skipdecode calibrate --adaptive`: what depth by difficulty would gain, then what gets a part of it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from skipdecode.cli.calibrate import STORE, draw, load
from skipdecode.cli.columns import figures
from skipdecode.cli.options import read_cost
from skipdecode.cli.options.records import check_records
from skipdecode.common.progress import note, progress_bar
from skipdecode.errors import UsageError
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skipdecode.calibration.adaptive import Compared, DepthTable
    from skipdecode.cli.calibrate import Config
    from skipdecode.data.prompts import Example
    from skipdecode.engine.adaptive import Router
    from skipdecode.models.loading.hub import LoadedModel

__all__ = ["run"]

_LEAST_GAIN = 0.01  # nats a token: less is not worth a router
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


def run(config: Config) -> int:
    """Measure, print the oracle, and where it gains, make and print what gets a part of it."""
    from skipdecode.calibration.adaptive import oracle
    from skipdecode.engine.adaptive import ROUTER_FILE, identity

    speedup = config.target_speedup
    if speedup is None:
        raise UsageError("--adaptive compares at equal time: give --target-speedup, of requests")
    parts = _parts(config)
    loaded = load(config)
    depths = _depths(config, loaded)
    model = identity(loaded.model)
    table = _table(config, loaded, depths, {task: draw(part, loaded)[0] for task, part in parts.items()})
    possible = oracle(table, speedup)
    gained = possible[0].gain >= _LEAST_GAIN and possible[0].low > 0
    runs, router = _learned(table, speedup, model) if gained else ([], None)
    document = {name: [each.to_dict() for each in found] for name, found in (("oracle", possible), ("runs", runs))}
    place = Path(config.out) / ROUTER_FILE
    if router is not None:
        router.save(place, figures=document)
    print(json.dumps(document) if config.json else _report(config, depths, document, place))
    return 0


def _parts(config: Config) -> dict[str, Config]:
    """The records of each task, checked as far as can be without a model."""
    parts = {config.task or "data": replace(config, held_out=0)}
    for word in config.mixture:
        task, equals, file = word.partition("=")
        if not equals or task in parts:
            raise UsageError(f"--mixture {word}: give TASK=FILE, each task once")
        alone = replace(config, prompt_template=None, prompt_field=None, response_field=None, chat=False, held_out=0)
        parts[task] = replace(alone, task=task, data=file)
    for part in parts.values():
        check_records(part, "data")
    return parts


def _depths(config: Config, loaded: LoadedModel) -> list[Schedule]:
    """The deepest first: flat ones of --depths, or those that the weights were tuned under."""
    from skipdecode.engine.adaptive import check_depths

    layers, recipe = loaded.num_layers, loaded.recipe
    tuned = () if recipe is None else recipe.tuned_under
    base = loaded.schedule or next(iter(tuned), Schedule.constant(layers, layers))
    if not base.drop_order:
        base = Schedule(layers, tuple(range(1, layers - 1)), (layers,))
    found = [replace(base, budgets=(n,), name=f"flat-{n}") for n in config.depths]
    if not found:
        found = [replace(base, budgets=(layers,), name="full") if each.is_full else each for each in tuned]
    depths = sorted(found, key=lambda each: -each.mean_budget())
    if len(depths) < 2:
        raise UsageError("the checkpoint does not say that it serves several depths: give --depths, such as 30 20 15")
    check_depths(depths)
    return depths


def _table(
    config: Config, loaded: LoadedModel, depths: Sequence[Schedule], examples: dict[str, list[Example]]
) -> DepthTable:
    from skipdecode.calibration.adaptive import DepthTable
    from skipdecode.calibration.meter import LossMeter, identity_of
    from skipdecode.common.journal import KeptValues
    from skipdecode.models.attach import Attachment
    from skipdecode.performance.cost_source import find_cost

    out, size = Path(config.out), config.batch_size
    tokenizer: Any = loaded.tokenizer  # pads, as loaded
    prompt_len = round(median(len(e.prompt) for rows in examples.values() for e in rows))
    known = config.cost is not None
    cost = (
        read_cost(config.cost or "")
        if known
        else find_cost(config.model, batch=config.batch, prompt_len=prompt_len).cost
    )
    out.mkdir(parents=True, exist_ok=True)
    store = KeptValues(
        out / STORE,
        identity_of(loaded.model, config.model, list(examples.values()), size),
        pieces="measurements",
        remedy="give another --out",
    )
    meters: dict[str, LossMeter] = {}
    with progress_bar(None, "batch", name="measuring") as bar, Attachment(loaded.model, depths[0]) as attachment:
        for task, rows in examples.items():
            meters[task] = LossMeter(
                attachment, rows, store, part=task, batch_size=size, pad_id=tokenizer.pad_token_id, advance=bar.update
            )
        bar.reset(total=sum(meter.batches for meter in meters.values()))
        table = DepthTable(depths, meters, cost)
    store.close()
    return table


def _learned(table: DepthTable, speedup: float, model: dict[str, Any]) -> tuple[list[Compared], Router]:
    """What a router and thresholds gain, and the router."""
    import numpy as np

    from skipdecode.calibration.adaptive import NEVER, find_router, find_thresholds, follow, penalties
    from skipdecode.engine.adaptive import WAYS, Router

    fit = find_router(table)
    choice, _ = fit.choice(table, speedup)
    runs = table.chosen(WAYS[0], choice)
    thresholds = find_thresholds(table, speedup)
    if thresholds is None:
        note("no thresholds of confidence reach the target: they are left out")
        thresholds = (NEVER,) * (len(table.depths) - 1)
    else:
        for way, begun in ((WAYS[1], np.zeros_like(choice)), (WAYS[2], choice)):
            runs += table.compare(way, *follow(table, thresholds, begun))
    router = Router(
        depths=table.depths,
        costs=tuple(table.costs.tolist()),
        centre=tuple(fit.centre.tolist()),
        scale=tuple(fit.scale.tolist()),
        weights=tuple(map(tuple, fit.weights.tolist())),
        penalties=tuple(penalties(table, fit)),
        speedup=speedup,
        thresholds=thresholds,
        model=model,
    )
    return runs, router


def _report(config: Config, depths: Sequence[Schedule], document: dict[str, Any], place: Path) -> str:
    possible, runs = document["oracle"], document["runs"]
    gain = f"{possible[0]['gain']:+.4f} ({possible[0]['low']:+.4f} to {possible[0]['high']:+.4f}) nats a token"
    named = ", ".join(f"{depth.name} ({depth.mean_budget():.1f} layers)" for depth in depths)
    lines = [
        f"depths: {named}",
        "loss per response token; static: of the best depth, or mix of two, that takes as long",
        "",
        *figures(_COLUMNS, [*possible, *runs], absent=""),
        "",
    ]
    if not runs:
        return "\n".join([*lines, f"the oracle gains {gain}: too little for a router, so none was made"])
    ways = {each["method"]: each for each in reversed(runs)}  # on all records, which come first
    sure = [name for name, each in ways.items() if each["low"] > 0]
    use = ["skipdecode", "generate", config.model, "--schedule", (sure or ["adaptive"])[-1], "--router", str(place)]
    lines += [
        f"the oracle, which knows all losses, gains {gain}",
        f"ahead of static beyond chance: {', '.join(reversed(sure)) or 'none, so a static depth is the better choice'}",
        f"next: {shlex.join(use)} --input prompts.jsonl (no --router with the file beside the checkpoint's weights)",
    ]
    return "\n".join(lines)
