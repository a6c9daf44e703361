"""Write every table in README and docs from the result file it names; `--check` fails where one is out of date.

A table stands between `<!-- table NAME results/FILE.json -->` and `<!-- end table -->`.

    python benchmarks/tables.py
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import ge, itemgetter
from pathlib import Path
from typing import Any

from skipdecode.common.jsonl import read_result

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
METRICS = {"bleu": "BLEU", "rougeL": "ROUGE-L", "bertscore_f1": "BERT-F"}
BLOCK = re.compile(r"(<!-- table (\S+) (\S+) -->\n).*?(<!-- end table -->)", re.DOTALL)


Row = Mapping[str, Any]
Column = tuple[str, str | Callable[[Row], str]]
"""The head of a column, and its cell: a format of the fields of a row, or a function of the row."""
Table = list[list[str]]


def table(rows: Iterable[Row], columns: Sequence[Column]) -> Table:
    """A table: its head, and a line for each row."""
    return [[name for name, _ in columns], *([cell(row, form) for _, form in columns] for row in rows)]


def cell(row: Row, form: str | Callable[[Row], str]) -> str:
    """The text of a row in a column; "-" if a field is missing or None."""
    try:
        return form.format_map(row) if isinstance(form, str) else form(row)
    except (KeyError, TypeError):  # None has no format
        return "-"


def nominal(row: Row) -> str:
    """The nominal speed-up."""
    return f"{row['nominal_speedup']:.1f}x".replace(".0x", "x") if row["nominal_speedup"] else "-"


# ---------------------------------------------------------------------- speed


def bench(document: Row) -> Table:
    """`speed.py`: an engine and a batch size in each row, with figures for each nominal speed-up."""
    figures: list[Column] = [
        ("tokens/s", "{decode_tokens_per_s:.1f}"),
        ("speed-up (byte bound)", "{decode_speedup:.2f}x ({amdahl_bound:.2f}x)"),
        ("x transformers", "{speedup_over_transformers:.2f}x"),
        ("of limit", "{roofline_share:.0%}"),
    ]
    if any(row.get("request_speedup") for row in document["rows"]):  # older files have decode steps alone
        figures.insert(0, ("speed-up of requests", "{request_speedup:.2f}x"))
    speedups = sorted({row["nominal_speedup"] for row in document["rows"]})
    found: dict[tuple[str, int], dict[float, Row]] = {}
    for row in document["rows"]:
        found.setdefault((row["engine"], row["batch"]), {})[row["nominal_speedup"]] = row
    columns = [(name, form, s) for name, form in figures for s in speedups if s > 1 or not name.startswith("speed-up")]
    lines = [["engine", "batch", *(f"{name}, {speedup:g}x" for name, _, speedup in columns)]]
    for (engine, batch), rows in found.items():
        lines.append([engine, str(batch), *(cell(rows[s], form) if s in rows else "-" for _, form, s in columns)])
    return lines


def products(document: Row) -> Table:
    """Forwards of one prompt, and steps of a batch, against the machine's product and against bf16."""
    columns: list[Column] = [
        (
            "what",
            lambda row: f"prompt of {row['tokens']}" if "tokens" in row else f"decode step of {row['batch']} sequences",
        ),
        ("weights", "{weights}"),
        ("ms", lambda row: f"{1000 * row['seconds']:.1f}"),
        ("GFLOP/s", "{gflop_s:.0f}"),
        ("of the best product", "{of_best_product:.2f}"),
        ("x bf16", "{over_bf16:.2f}x"),
    ]
    return table(document["rows"], columns)


def peers(document: Row) -> Table:
    """Tokens a second of each engine by task and batch, and the least share of texts that are those of bf16."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in document["rows"]:
        cell = f"{row['task']}, {row['batch']}"
        found.setdefault(row["peer"], {})[cell] = row
    cells = list(dict.fromkeys(cell for group in found.values() for cell in group))
    rows = [["engine", *cells, "equal texts, least"]]
    for name, group in found.items():
        speeds = (f"{group[cell]['tokens_per_s']:.0f}" if cell in group else "-" for cell in cells)
        rows.append([name, *speeds, f"{min(row['equal'] for row in group.values()):.0%}"])
    return rows


def serve_load(document: Row) -> Table:
    """Throughput of each schedule, with percentiles of first token and between chunks in milliseconds."""

    def waited(field: str, quantile: str) -> Callable[[Row], str]:
        return lambda row: f"{1000 * row[field][quantile]:.0f}"

    columns: list[Column] = [("schedule", "{name}"), ("tokens/s", "{tokens_per_s:.1f}")]
    for what, field in (("first token", "first_token_s"), ("between tokens", "between_chunks_s")):
        columns += [(f"{what}, {quantile}, ms", waited(field, quantile)) for quantile in ("p50", "p99")]
    return table([{"name": name, **row} for name, row in document["schedules"].items()], columns)


# ---------------------------------------------------------------------- quality


def scores() -> list[Column]:
    """For each metric the score with half the width of its interval, and the share that is kept with its interval."""

    def scored(metric: str) -> Callable[[Row], str]:
        return lambda row: "{:.1f} ± {:.1f}".format(
            row[metric], (row["intervals"][metric][1] - row["intervals"][metric][0]) / 2
        )

    def kept(metric: str) -> Callable[[Row], str]:
        return lambda row: share_of(row["retained"][metric]) if row["retained"][metric] else "-"

    return [column for metric, name in METRICS.items() for column in ((name, scored(metric)), ("kept", kept(metric)))]


def share_of(share: Row) -> str:
    """A share with its interval."""
    return f"{share['share']:.1%} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"


def quality(document: Row) -> Table:
    """Scores of methods by nominal speed-up, with the share of tuned full depth's that each keeps."""
    several = len({row["checkpoint"] for row in document["runs"]}) > 1
    columns: list[Column] = [
        ("method", "{method}"),
        *([("checkpoint", "{checkpoint}")] if several else []),
        ("nominal", nominal),
        ("measured", "{decode_speedup:.2f}x"),
        ("with prompts", "{request_speedup:.2f}x"),
        ("mean layers", "{mean_layers:.1f}"),
    ]
    return table(document["runs"], columns + scores())


def requests(document: Row) -> Table:
    """Whole-request speed-ups beside what is kept: by rising speed-up."""
    columns: list[Column] = [
        (
            "method",
            lambda row: ("{checkpoint}" if row["nominal_speedup"] > 1 else "{method}, {checkpoint}").format_map(row),
        ),
        ("prompt layers", "{prompt_layers}"),
        ("nominal", nominal),
        ("request", "{request_speedup:.2f}x"),
        ("request, batch 1", "{request_speedup_batch_1:.2f}x"),
        ("decode", "{decode_speedup:.2f}x"),
        ("layers a token", "{mean_layers:.1f}"),
    ]
    return table(sorted(document["runs"], key=lambda row: row["request_speedup"]), columns + scores())


def headline(document: Row) -> Table:
    """Of `requests` the rows that no other beats in time, quality and names copied; against transformers too."""
    layers = max(row["prompt_layers"] for row in document["runs"])
    invented = read_result(ROOT / "results" / "unseen-names-prepared-e2e-smollm2-135m.json")["rows"]
    copied = {checkpoint_and_schedule(row): row["share"] for row in invented}

    def measured(row: Row) -> tuple[float, float, float]:
        return row["request_speedup"], least_kept(row), copied[checkpoint_and_schedule(row)]

    rows = sorted(document["runs"], key=measured)
    beaten = [any(other is not row and all(map(ge, measured(other), measured(row))) for other in rows) for row in rows]
    columns: list[Column] = [
        ("layers of prompt tokens", lambda row: f"{row['prompt_layers']} of {layers}"),
        ("layers of new tokens", lambda row: f"{row['mean_layers']:.1f} of {layers} (nominal {nominal(row)})"),
        ("request, x transformers", "{request_speedup_over_transformers:.1f}x"),
        ("request, x full depth", "{request_speedup:.2f}x"),
        ("decoding, x full depth", "{decode_speedup:.2f}x"),
        ("quality kept", lambda row: f"{least_kept(row):.1%}"),
        ("invented names copied", lambda row: f"{measured(row)[2]:.0%}"),
    ]
    return table([row for row, worse in zip(rows, beaten, strict=True) if not worse], columns)


def checkpoint_and_schedule(row: Row) -> tuple[str, int, float]:
    """What tells the rows of a checkpoint apart in results of several benchmarks."""
    return row["checkpoint"], row["prompt_layers"], round(row["nominal_speedup"], 1)


def least_kept(row: Row) -> float:
    """The least of the shares of the scores that a row keeps."""
    return min(float(row["retained"][name]["share"]) for name in METRICS)


def leads(document: Row) -> Table:
    """By how much the best method of a nominal speed-up is ahead of each other one."""
    ahead = [
        (f"{name}, points", f"{{ahead[{key}][points]:+.1f}} [{{ahead[{key}][low]:.1f}}, {{ahead[{key}][high]:.1f}}]")
        for key, name in METRICS.items()
    ]
    columns: list[Column] = [("nominal", "{nominal_speedup:g}x"), ("best", "{best}"), ("ahead of", "{other}"), *ahead]
    return table(document["leads"], columns)


def chat(document: Row) -> Table:
    """What each depth leaves of a base chat model, on prompts drawn from it and on others."""
    layers = {schedule["name"]: schedule["budgets"][0] for schedule in document["schedules"]}
    ratio = "{of_base[estimate]:.3f} [{of_base[low]:.3f}, {of_base[high]:.3f}]"
    perplexity: Column = ("perplexity of base model", ratio)
    kl = "{kl[estimate]:.3f}"
    columns: list[Column] = [
        ("layers", lambda row: str(layers.get(row["name"], row["name"]))),
        ("request", "{request_speedup:.2f}x"),
        ("request, batch 1", "{batch_1[request_speedup]:.2f}x"),
        ("decode", "{decode_speedup:.2f}x"),
        ("KL", kl),
        ("same token", "{top1_agreement[estimate]:.1f}%"),
        perplexity,
        ("instructions followed", "{instructions[followed]:.1%}"),
    ]
    others = table(document["other_prompts"]["rows"], [("other prompts: KL", kl), perplexity])
    return [one + two for one, two in zip(table(document["rows"], columns), others, strict=True)]


def names(document: Row) -> Table:
    """Names from outside the training records that come through, by checkpoint and prompts' layers."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    speedups = set[float]()
    for row in document["rows"]:
        checkpoint, prompt_layers, speedup = checkpoint_and_schedule(row)
        found.setdefault((checkpoint, prompt_layers), dict(row))[f"{speedup:g}x"] = row["share"]
        speedups.add(speedup)
    columns: list[Column] = [("checkpoint", "{checkpoint}"), ("prompt layers", "{prompt_layers}")]
    heads = [f"{speedup:g}x" for speedup in sorted(speedups)]
    columns += [(name, lambda row, name=name: f"{row[name]:.0%}") for name in heads]
    return table(found.values(), columns)


def compared_targets(document: Row) -> list[Row]:
    """The targets of `ready` whose task and hundreds of answers were also run without a fit, fitted and not."""

    def work(row: Row) -> tuple[str, int]:
        return row["task"], round(row["answers"], -2)

    targets = [row for row in document["rows"] if row["role"] == "target" and row["answers"]]
    bare = {work(row) for row in targets if row["method"].startswith("without fits")}
    return [row for row in targets if work(row) in bare]


def kept_at(row: Row) -> str:
    """What a row of `ready` keeps of full depth, and at which speed-up."""
    return f"{row['kept']:.1%} at {row['request_speedup']:.2f}x"


def ready_minutes(document: Row) -> Table:
    """What targets keep after minutes of preparation, with a fit and without."""
    rows = compared_targets(document)
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        found = lines.setdefault((row["task"], row["method"]), dict(row))
        found[f"{row['minutes']:g}"] = kept_at(row)
    minutes = sorted({row["minutes"] for row in rows})
    columns: list[Column] = [(name, "{" + name + "}") for name in ("task", "method", "answers")]
    columns += [(f"{m:g} minutes" if m else "not tuned", lambda row, name=f"{m:g}": row[name]) for m in minutes]
    return table(lines.values(), columns)


def start(document: Row) -> Table:
    """The best target of each task after the 30 minutes of a fit and tuning, and one without tuning."""
    names = {"e2e": "data to text (E2E)", "tldr": "TL;DR", "cnn_dm": "CNN/DailyMail"}
    targets = [row for row in document["rows"] if row["role"] == "target" and row["method"].startswith("fitted")]
    rows = [next(row for row in targets if row["minutes"] == 0)]
    for task in names:
        rows.append(max((r for r in targets if r["task"] == task and r["minutes"] == 30), key=itemgetter("kept")))
    columns: list[Column] = [
        ("SmolLM2-135M", lambda row: names[row["task"]] + ("" if row["minutes"] else ", not tuned")),
        ("minutes", lambda row: f"{row['cpu_minutes']:.0f}"),
        ("request speed-up", "{request_speedup:.2f}x"),
        ("quality kept", lambda row: f"{row['kept']:.0%}"),
    ]
    return table(rows, columns)


def ready(document: Row) -> Table:
    """What `skipdecode prepare` keeps, by task, method and minutes: the target with its neighbours, in one line."""
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in document["rows"]:
        found = lines.setdefault((row["task"], row["method"], row["minutes"]), {})
        found[{"milder": "slower"}.get(row["role"], row["role"])] = kept_at(row)  # its name in earlier versions
        if row["role"] == "target":
            found.update(row)
    columns: list[Column] = [
        ("task", "{task}"),
        ("method", "{method}"),
        ("answers", lambda row: str(row["answers"] or "-")),
        ("minutes", lambda row: f"{row['cpu_minutes']:.1f}" + ("" if row["minutes"] else ", no tuning")),
        ("slower", "{slower}"),
        ("target", "{target}"),
        ("faster", "{faster}"),
        ("names and numbers copied, target", lambda row: "-" if row["copied"] is None else f"{row['copied']:.0f}%"),
        ("perplexity ratio, target", "{perplexity_ratio:.2f}"),
    ]
    return table(lines.values(), columns)


def exact(document: Row) -> Table:
    """Drafts against one token a step at full depth, with transformers' own drafts at batch 1."""
    columns: list[Column] = [
        ("task", "{task}"),
        ("weights", lambda row: {"none": "bf16"}.get(row["quantization"], row["quantization"])),
        ("batch", "{batch}"),
        ("request, x full depth", "{request_speedup:.2f}x"),
        ("drafts a step", "{gamma:.1f}"),
        ("accepted", "{acceptance:.0%}"),
        *(
            (f"{name}, x full depth", lambda row, n=name: f"{row['others'][n]:.2f}x" if row["others"] else "-")
            for name in dict.fromkeys(name for row in document["rows"] for name in row["others"])
        ),
    ]
    return table(sorted(document["rows"], key=itemgetter("task", "quantization", "batch")), columns)


def lm_eval(document: Row) -> Table:
    """Scores of tasks of lm-evaluation-harness, each with the difference from the first schedule of its model."""
    form = "{0[estimate]:.1%} [{0[low]:.1%}, {0[high]:.1%}], {0[difference][estimate]:+.1%}"
    tasks = [(n, lambda row, n=n: form.format(row["tasks"][n])) for n in document["rows"][0]["tasks"]]
    return table(document["rows"], [("model", "{model}"), ("schedule", "{name}"), ("nominal", nominal), *tasks])


def recipes(document: Row) -> Table:
    """What recipes of the field keep after the same minutes, beside the project's."""
    columns: list[Column] = [
        ("recipe", "{recipe}"),
        ("layers of prompts; of new tokens", lambda row: "{}; {}".format(*row["layers"])),
        ("tokens learned", "{tokens:,}"),
        ("request speed-up", "{request_speedup:.2f}x"),
        ("quality kept", "{kept:.1%}"),
        ("values copied", "{copied:.1f}%"),
    ]
    return table(document["rows"], columns)


def plain(rows: Sequence[Row]) -> Table:
    """The fields of rows as they are."""
    return [[*rows[0]], *([str(value) for value in row.values()] for row in rows)]


def memory(document: Row) -> Table:
    """Peak memory of a verb, beside what it must hold."""
    columns: list[Column] = [("model", "{model}"), ("quantization", "{quantization}"), ("verb", "{verb}")]
    sizes = [("peak, MiB", "peak"), ("without weights, MiB", "without_weights"), ("needed, MiB", "needed")]
    columns += [(head, lambda row, size=size: f"{row[size] / 2**20:,.0f}") for head, size in sizes]
    columns.append(("(peak − without weights) / needed", "{ratio:.2f}"))
    return table(document["rows"], columns)


def humaneval(document: Row) -> Table:
    """Problems of HumanEval that each way solves."""
    first = document["rows"][0]["passed"]
    columns: list[Column] = [("weights and schedule", lambda row: row["way"].replace("quantization=", ""))]
    columns += [("pass@1", "{pass_at_1:.1%}"), ("95% interval", "{interval[0]:.1%} to {interval[1]:.1%}")]
    columns.append(("against full depth", lambda row: f"{row['passed'] / first:.0%}"))
    return table(document["rows"], columns)


def prepared_rows(document: Row) -> Table:
    """What runs of `prepare` found: each way with its speed-up and the quality that it keeps."""
    columns: list[Column] = [("task", "{task}"), ("way", "{lever}"), ("minutes", "{minutes:g}")]
    columns += [("request speed-up", "{request_speedup:.2f}x"), ("kept", "{kept:.1%}")]
    columns.append(("95% interval", "{kept_interval[low]:.1%} to {kept_interval[high]:.1%}"))
    return table(document["rows"], columns)


def first(document: Row) -> Table:
    """Show for each task of `prepare` what its largest number of minutes brought, and what W8A8 with drafts brings."""
    columns: list[Column] = [
        ("Qwen2.5-Coder-0.5B", "{shown}"),
        ("minutes", "{minutes:g}"),
        ("request speed-up", "{request_speedup:.2f}x"),
        ("quality kept", "{kept:.0%}"),
    ]
    chosen = (
        ("tldr, target 2.3, with W8A8", 60, "paper-p12-24to22, w8a8", "summaries (TL;DR), W8A8 and fewer layers"),
        ("cnn_dm, target 1.9, with W8A8", 60, "paper-p16-24, w8a8", "news (CNN/DailyMail), W8A8 and fewer layers"),
        ("e2e, target 2.45", 45, "paper-p4-9to5", "data to text (E2E), fewer layers"),
        ("e2e, target 2.45", 45, "paper-p4-9to5, w8a8", "data to text (E2E), fewer layers and W8A8"),
        ("tldr, target 2.3", 60, "calibrated-p6-22to11", "summaries (TL;DR), fewer layers alone"),
        ("code", 0, "full, w8a8, exact", "code, all layers, W8A8 and drafts"),
        ("code, 1.25x, 60 minutes", 60, "calibrated-1.25x-wall", "code, fewer layers: do not"),
    )
    tested = {
        "tldr, target 2.3": "tldr",
        "tldr, target 2.3, with W8A8": "tldr-w8a8",
        "cnn_dm, target 1.9, with W8A8": "cnn_dm-w8a8",
    }
    results, model = ROOT / "results", "qwen2.5-coder-0.5b.json"
    every = list(document["rows"])
    for task in ("e2e", "tldr", "summaries-w8a8"):
        every += read_result(results / f"prepare-{task}-{model}")["rows"]
    found = {(row["task"], row["minutes"], row["lever"]): row for row in every}
    rows = [dict(found[task, minutes, lever], shown=shown) for task, minutes, lever, shown in chosen]
    for row in rows:
        if row["task"] in tested:
            row["kept"] = least_share(results / f"eval-{tested[row['task']]}-{model}")
    # Perplexity flatters programs: the last row is of problems that are solved.
    skipping = read_result(results / f"humaneval-skipping-{model}")["rows"]
    rows[-1]["kept"] = skipping[-1]["passed"] / skipping[0]["passed"]
    return table(rows, columns)


def least_share(file: Path) -> float:
    """The smallest share of full depth's scores in a comparison of test records; scores below 5 do not count."""
    pairs = json.loads(file.read_text(encoding="utf-8"))["pairs"]
    return min(pair["ratio"]["estimate"] for pair in pairs if pair["a"] >= 5)


# By name, with the kind of result, or the benchmark, that each is made from.
TABLES: dict[str, tuple[str, Callable[[Row], Table]]] = {
    "bench": ("bench", bench),
    "chat": ("self-generated", chat),
    "exact": ("exact", exact),
    "families": ("families", lambda document: plain(document["rows"])),
    "faults": ("families", lambda document: plain(document["faults"])),
    "ready": ("ready", ready),
    "start": ("ready", start),
    "first": ("prepared-rows", first),
    "ready-minutes": ("ready", ready_minutes),
    "headline": ("quality-table", headline),
    "leads": ("quality-table", leads),
    "humaneval": ("humaneval", humaneval),
    "lm-eval": ("lm-eval", lm_eval),
    "memory": ("memory", memory),
    "recipes": ("recipes", recipes),
    "names": ("unseen-names", names),
    "prepared-rows": ("prepared-rows", prepared_rows),
    "products": ("product-speed", products),
    "quality": ("quality-table", quality),
    "requests": ("quality-table", requests),
    "serve-load": ("serve-load", serve_load),
    "peers": ("peers", peers),
}


def markdown(rows: Table) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body]) + "\n"


def filled(page: str) -> str:
    """A page's text with every table written anew."""

    def written(match: re.Match[str]) -> str:
        kind, rows = TABLES[match[2]]
        document = read_result(ROOT / match[3])
        if document.get("benchmark", document["kind"]) != kind:
            raise SystemExit(f"{match[3]} is no result of {kind}")
        return match[1] + markdown(rows(document)) + match[4]

    return BLOCK.sub(written, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table is out of date")
    check = parser.parse_args().check
    stale = [p for p in PAGES if filled(text := p.read_text(encoding="utf-8")) != text]
    for page in stale:
        print(f"{'out of date' if check else 'written'}: {page.relative_to(ROOT)}", file=sys.stderr)
        if not check:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
