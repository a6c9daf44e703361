"""Build the published quality table from finished runs of `skipdecode eval`.

    python benchmarks/quality_table.py runs/full runs/2x runs/3x --out results/e2e-smollm2-135m.json
    python benchmarks/quality_table.py runs/* --full runs/full --speed speed.json --out results/e2e-smollm2-135m.json

A run is a directory with a run.json, or one that holds such directories (`skipdecode eval --methods`). The yardstick is
the model tuned for and run at full depth: `--full`, or the one run of full depth. "retained" is a run's score over the
yardstick's, with the interval of a paired bootstrap over the records.

The measured speed-up is that of the eval run itself, from a few batches of it. Where runs are of several evaluations,
measure the schedules once more, all in turn (`schedule_speed.py`), and give that file as `--speed`. A run without a
schedule keeps its own speed. Each row says which it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import heading, read_result
from skipdecode.errors import DataError, SkipDecodeError
from skipdecode.evaluation.compare import compare_runs
from skipdecode.evaluation.metrics import METRICS
from skipdecode.evaluation.results import RUN_FILE, Run, load_run
from skipdecode.schedule import Schedule

NEEDED = ("bleu", "rougeL", "bertscore_f1")


def load_runs(places: Sequence[str]) -> list[Run]:
    """The runs of all places, in order."""
    found = []
    for place in map(Path, places):
        inside = sorted(place.glob(f"*/{RUN_FILE}")) if place.is_dir() and not (place / RUN_FILE).exists() else [place]
        if not inside:
            raise DataError(
                f"{place} holds no run of `skipdecode eval`: it needs a {RUN_FILE}, or directories with one"
            )
        found += [load_run(path) for path in inside]
    return found


def yardstick(runs: Sequence[Run], named: str | None) -> Run:
    """The run that all others are compared with."""
    if named is not None:
        full = load_run(named)
        if not full.full_depth:
            raise DataError(
                f"{named} is a run of {full.data['config']['method']['name']}: --full must be at full depth"
            )
        return full
    candidates = [run for run in runs if run.full_depth]
    if len(candidates) != 1:
        raise DataError(f"{len(candidates)} of the runs are at full depth: say with --full which is the yardstick")
    return candidates[0]


def speed_columns(run: Run, speed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Speed-up and where it is from."""
    if speed is None or not (run.full_depth or "schedule" in run.data["config"]["method"]):
        return own_speed(run)
    if run.full_depth:
        same = dict.fromkeys(("decode_speedup", "request_speedup"), 1.0)
        found = {**same, "decode_speedup_interval": None, "speed_from": source_of(speed)}
        return found | over(speed.get("transformers"), speed.get("full_depth"))
    found = timed(run.data["config"]["method"]["schedule"], speed)
    if found is None:
        raise DataError(f"the file of --speed does not have the depths of {run.path}: measure all in one call")
    return found


def timed(schedule: Mapping[str, Any], speed: Mapping[str, Any]) -> dict[str, Any] | None:
    """Speed-up of a schedule in a file of speeds; none where it is not there."""
    wanted = work_of(schedule)
    for row in speed["rows"]:
        if row["work"] == wanted:
            found = {k: v for k, v in row.items() if k.startswith(SPEEDUPS)}
            return found | {"speed_from": source_of(speed)} | over(speed.get("transformers"), row["speed"])
    return None


def source_of(speed: Mapping[str, Any]) -> dict[str, Any]:
    """Where speeds measured apart are from."""
    parts = ("kind", "format", "rows", "full_depth", "transformers", "environment")
    about = {k: v for k, v in speed.items() if k not in parts}
    return {"run": "measured apart", "threads": speed["environment"]["threads"], **about}


def over(theirs: Mapping[str, Any] | None, ours: Any) -> dict[str, float]:
    """Whole-request speed-up over full depth through transformers, where that was measured."""
    return {} if theirs is None else {"request_speedup_over_transformers": theirs["seconds"] / ours["seconds"]}


SPEEDUPS = ("request_speedup", "decode_speedup")


def named_speeds(columns: Mapping[str, Any], alone: Mapping[str, Any] | None) -> dict[str, Any]:
    """The columns of tables of request time, and the same of one row at a time."""
    found = {name: columns[name] for name in SPEEDUPS}
    return found | ({} if alone is None else {f"{name}_batch_1": alone[name] for name in SPEEDUPS})


def prompt_layers(schedule: Mapping[str, Any]) -> int:
    """Layers that prompt tokens run."""
    return len(Schedule.from_dict(schedule).prompt_layers())


def earlier_rows(
    table: Mapping[str, Any], name: str, speeds: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]
) -> list[dict[str, Any]]:
    """The scheduled rows of an earlier table: their quality as it stands there, their speed from these files."""
    found = []
    for row in table["runs"]:
        schedule = row["decoding"].get("schedule")
        columns, alone = (schedule and speed and timed(schedule, speed) for speed in speeds)
        if columns:
            kept = {k: v for k, v in row.items() if not k.startswith(SPEEDUPS)}
            first = {k: kept.pop(k) for k in ("method", "checkpoint", "nominal_speedup")}
            layers = {"prompt_layers": prompt_layers(schedule)}
            found.append(first | layers | named_speeds(columns, alone) | kept | columns | {"quality_from": name})
    return found


def work_of(schedule: Mapping[str, Any]) -> dict[str, Any]:
    """What of a schedule decides its time: the depths, for one layer takes the time of another.

    Where prompts have layers of their own, how many more are projected depends on the order.
    """
    names = ("num_layers", "budgets", "prompt")
    return {name: schedule[name] for name in (*names, *([] if isinstance(schedule["prompt"], str) else ["drop_order"]))}


def own_speed(run: Run) -> dict[str, Any]:
    """Speed-up within the evaluation."""
    config, speed, here = run.data["config"], run.data["speed"], run.data["environment"]
    names = ("decode_speedup", "decode_speedup_interval", "request_speedup")
    found = dict.fromkeys(names) | {n: value for n, value in run.data.items() if n.startswith(SPEEDUPS)}
    bounds = {n: value and [value["low"], value["high"]] for n, value in found.items() if n.endswith("_interval")}
    settings = {
        "dtype": config["dtype"],
        "quantization": config.get("quantization", "none"),
        "device": config["device"],
    }
    about = {"what": speed["what"], "records": speed["records"]} if speed else {}
    about |= {"engine": run.data["engine"], "batch_size": config["settings"]["batch_size"], **settings}
    about |= {"run": "the evaluation itself", "date": here["date"], "threads": here["threads"]}
    return {**found, **bounds, "speed_from": about}


def scores(run: Run) -> dict[str, Any]:
    """Scores, and the bounds of their 95% intervals."""
    entries = run.data["metrics"]
    bounds = {name: [entry["interval"]["low"], entry["interval"]["high"]] for name, entry in entries.items()}
    return {name: entry["score"] for name, entry in entries.items()} | {"intervals": bounds}


def retained(run: Run, full: Run, resamples: int) -> dict[str, Any]:
    """Share of the yardstick's score that the run keeps, with its paired interval, for each metric with references."""
    names = [name for name in full.data["metrics"] if name in METRICS and name in run.data["metrics"]]
    kept = {}
    for pair in compare_runs([full, run], [*NEEDED, *(n for n in names if n not in NEEDED)], resamples=resamples):
        ratio = pair.comparison.ratio
        kept[pair.metric] = None if ratio is None else {"share": ratio.estimate, "low": ratio.low, "high": ratio.high}
    return kept


def row(
    run: Run,
    full: Run,
    speeds: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None],
    label: Mapping[str, str],
    common: Mapping[str, Any],
    resamples: int,
) -> dict[str, Any]:
    """One line of the table."""
    data, config = run.data, run.data["config"]
    recipe = config.get("recipe")
    own = {k: v for k, v in options_of(run).items() if k not in common}
    columns, schedule = speed_columns(run, speeds[0]), config["method"].get("schedule")
    return {
        **label,
        "nominal_speedup": data["nominal_speedup"],
        "prompt_layers": round(run.layers_per_token) if schedule is None else prompt_layers(schedule),
        **named_speeds(columns, None if speeds[1] is None else speed_columns(run, speeds[1])),
        **columns,
        "mean_layers": run.layers_per_token,
        "n": data["n"],
        **scores(run),
        "retained": retained(run, full, resamples),
        "recipe": None
        if recipe is None
        else {"schedule": recipe["schedule"], "options": own, "result": recipe["result"]},
        "decoding": config["method"],
        "commit": data["environment"]["commit"],
        "date": data["environment"]["date"],
    }


def options_of(run: Run) -> dict[str, Any]:
    """The options its model was tuned with; of a local path only the name."""
    options = (run.data["config"].get("recipe") or {}).get("options", {})
    return {k: Path(v).name if isinstance(v, str) and Path(v).is_absolute() else v for k, v in options.items()}


def leads(runs: Sequence[Run], named: Mapping[Path, Mapping[str, str]], resamples: int) -> list[dict[str, Any]]:
    """At each nominal speed-up, the run with the best BLEU against each other, paired: what it is ahead by."""
    by_speed: dict[int, list[Run]] = {}
    for run in runs:
        # Whole layers miss a nominal speed-up by a little, each order by as much.
        by_speed.setdefault(round(run.data["nominal_speedup"] or 0), []).append(run)
    found = []
    for speedup, group in sorted(by_speed.items()):
        best = max(group, key=lambda run: float(run.data["metrics"]["bleu"]["score"]))
        for other in (run for run in group if run is not best and speedup > 1):
            ahead = {}
            for pair in compare_runs([other, best], NEEDED, resamples=resamples):
                gap = pair.comparison.difference
                ahead[pair.metric] = {"points": gap.estimate, "low": gap.low, "high": gap.high}
            names = {"best": named[best.path]["method"], "other": named[other.path]["method"]}
            found.append({"nominal_speedup": speedup, **names, "ahead": ahead})
    return found


def labels(runs: Sequence[Run], full: Run) -> dict[Path, dict[str, str]]:
    """Method and checkpoint of each run. A method on several checkpoints is named with each, but for the yardstick."""
    methods = {r.path: r.data["config"]["method"] for r in runs}
    curves = {p: Schedule.from_dict(m["schedule"]).curve if "schedule" in m else m["name"] for p, m in methods.items()}
    named = {r.path: (curves[r.path], Path(r.data["config"]["model"]).name) for r in runs}
    found = {}
    for path, (method, checkpoint) in named.items():
        shared = len({other for name, other in named.values() if name == method}) > 1 and path != full.path
        found[path] = {"method": f"{method}, {checkpoint}" if shared else method, "checkpoint": checkpoint}
    return found


def build(
    runs: Sequence[Run],
    full: Run,
    speeds: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None],
    resamples: int,
    beside: Path | None = None,
) -> dict[str, Any]:
    """The document."""
    runs = runs if any(run.path == full.path for run in runs) else [full, *runs]
    tuned = [options_of(run) for run in runs if run.data["config"].get("recipe")]
    common = {k: v for k, v in tuned[0].items() if all(o.get(k) == v for o in tuned)} if tuned else {}
    config = full.data["config"]
    named = labels(runs, full)
    rows = [row(run, full, speeds, named[run.path], common, resamples) for run in runs]
    rows += [] if beside is None else earlier_rows(read_result(beside, "quality-table"), beside.name, speeds)
    return {
        **heading("quality-table"),
        "environment": full.data["environment"] if speeds[0] is None else speeds[0]["environment"],
        "model": named[full.path]["checkpoint"],
        "task": {
            "name": config["task"]["name"],
            "data": config["data"],
            "data_sha256": config["data_sha256"],
            "records": full.data["n"],
            "decoding": "greedy",
            "max_new_tokens": config["settings"]["max_new_tokens"],
        },
        "metrics": {name: entry["signature"] for name, entry in full.data["metrics"].items() if name in METRICS},
        "intervals": "95%, bootstrap over records; of retained, paired with full depth's; of speed, over batches",
        "recipe": {"options": common, "data": (config.get("recipe") or {}).get("data")},
        "runs": sorted(rows, key=lambda r: (r["nominal_speedup"] or 0, r["method"])),
        "leads": leads(runs, named, resamples),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Build and write; returns 0, or 1 with one line that says what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="directories of runs")
    parser.add_argument("--full", help="the run at full depth that all are compared with (default: the only one)")
    parser.add_argument("--speed", type=Path, help="what schedule_speed.py wrote (default: the runs' own speed)")
    parser.add_argument("--speed-alone", type=Path, help="the same of one row at a time, for columns of its own")
    parser.add_argument("--beside", type=Path, help="an earlier table whose schedules are timed in --speed: their rows")
    parser.add_argument("--resamples", type=int, default=1000, help="draws of the bootstrap (default: 1000)")
    parser.add_argument("--out", required=True, help="file for the table as JSON")
    options = parser.parse_args(argv)
    try:
        runs = load_runs(options.runs)
        full = yardstick(runs, options.full)
        files = (options.speed, options.speed_alone)
        speeds = tuple(None if file is None else read_result(file, "benchmark") for file in files)
        document = build(runs, full, speeds, options.resamples, options.beside)
        write_whole(options.out, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    except (SkipDecodeError, OSError) as e:
        print(f"quality_table: {e}", file=sys.stderr)
        return 1
    print(f"{len(runs)} runs against {full.path.parent.name}: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
