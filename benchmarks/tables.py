"""Write every table in README and docs from the result file it names; `--check` fails where one is out of date.

A table stands between `<!-- table NAME results/FILE.json -->` and `<!-- end table -->`.

    python benchmarks/tables.py
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skipdecode.common.kinds import read_result

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
METRICS = {"bleu": "BLEU", "rougeL": "ROUGE-L", "bertscore_f1": "BERT-F"}
BLOCK = re.compile(r"(<!-- table (\S+) (\S+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def decode(document: dict[str, Any]) -> list[list[str]]:
    """Decode-phase speed: nominal, layers, tokens/s, measured and predicted speed-up, KV cache."""
    head = ["nominal speed-up", "mean layers", "tokens/s", "measured speed-up", "cost model says", "KV cache held"]
    return [
        head,
        *(
            [
                f"{row['nominal_speedup']:g}x",
                f"{row['mean_layers']:.1f}",
                f"{row['decode_tokens_per_s']:.1f}",
                f"{row['decode_speedup']:.2f}x",
                f"{row['predicted_speedup']:.2f}x",
                f"{row['kv_bytes'] / row['kv_bytes_full']:.0%}",
            ]
            for row in document["rows"]
        ),
    ]


def bench(document: dict[str, Any]) -> list[list[str]]:
    """`skipdecode bench`: an engine and a batch size in each row, with figures for each nominal speed-up."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "tokens/s": lambda row: f"{row['decode_tokens_per_s']:.1f}",
        "speed-up (byte bound)": lambda row: f"{row['decode_speedup']:.2f}x ({row['amdahl_bound']:.2f}x)",
        "x transformers": lambda row: times(row["speedup_over_transformers"]),
        "of limit": lambda row: f"{row['roofline_share']:.0%}",
    }
    speedups = sorted({row["nominal_speedup"] for row in document["rows"]})
    cells = [(name, s) for name in columns for s in speedups if s > 1 or not name.startswith("speed-up")]
    found: dict[tuple[str, int], dict[float, dict[str, Any]]] = {}
    for row in document["rows"]:
        found.setdefault((row["engine"], row["batch"]), {})[row["nominal_speedup"]] = row
    return [
        ["engine", "batch", *(f"{name}, {speedup:g}x" for name, speedup in cells)],
        *(
            [engine, str(batch), *(columns[name](rows[s]) if s in rows else "-" for name, s in cells)]
            for (engine, batch), rows in found.items()
        ),
    ]


def exact_head(document: dict[str, Any]) -> list[list[str]]:
    """What the 8-bit copy of the head gains in decoding."""
    head = ["batch", "nominal", "full head, ms a step", "with the copy", "gain"]
    return [
        head,
        *(
            [
                str(row["batch"]),
                f"{row['nominal_speedup']:g}x",
                f"{row['full_head_ms']:.2f}",
                f"{row['ms']:.2f}",
                f"{row['gain']:.2f}x",
            ]
            for row in document["speed"]
        ),
    ]


def same_tokens(document: dict[str, Any]) -> list[list[str]]:
    """How often the 8-bit copy of the head decided, and how many words it left."""
    head = [
        "prompts",
        "weights",
        "steps",
        "decided by the copy",
        "other tokens than the full head's",
        "fell back",
        "candidates, mean",
    ]
    return [
        [*head, "most"],
        *(
            [
                row["data"],
                {"none": "bfloat16"}.get(row["quantization"], row["quantization"]),
                f"{row['steps']:,}",
                f"{row['rows_decided']:,}",
                str(row["different"]),
                *(
                    (f"{row['fallback_share']:.2%}", f"{row['mean_candidates']:.1f}", str(row["max_candidates"]))
                    if row["rows_decided"]
                    else ("-",) * 3
                ),
            ]
            for row in document["same"]
        ),
    ]


def quality(document: dict[str, Any]) -> list[list[str]]:
    """Scores of methods by nominal speed-up, with the share of tuned full depth's that each keeps."""
    several = len({row["checkpoint"] for row in document["runs"]}) > 1
    head = ["method", *(["checkpoint"] if several else []), "nominal", "measured", "with prompts", "mean layers"]
    return [
        [*head, *(cell for name in METRICS.values() for cell in (name, "kept"))],
        *(
            [
                row["method"],
                *([row["checkpoint"]] if several else []),
                nominal(row),
                times(row["measured_speedup"]),
                times(row.get("measured_speedup_with_prompt")),
                f"{row['mean_layers']:.1f}",
                *(cell for name in METRICS for cell in (scored(row, name), kept(row["retained"][name]))),
            ]
            for row in document["runs"]
        ),
    ]


def requests(document: dict[str, Any]) -> list[list[str]]:
    """Whole-request speed-ups beside what is kept: by rising speed-up."""
    head = ["method", "prompt layers", "nominal", "request", "request, batch 1", "decode", "layers a token"]
    return [
        [*head, *(cell for name in METRICS.values() for cell in (name, "kept"))],
        *(
            [
                row["checkpoint"] if row["nominal_speedup"] > 1 else f"{row['method']}, {row['checkpoint']}",
                str(row["prompt_layers"]),
                nominal(row),
                times(row["request_speedup"]),
                times(row.get("request_speedup_batch_1")),
                times(row["decode_speedup"]),
                f"{row['mean_layers']:.1f}",
                *(cell for name in METRICS for cell in (scored(row, name), kept(row["retained"][name]))),
            ]
            for row in sorted(document["runs"], key=lambda row: row["request_speedup"])
        ),
    ]


def headline(document: dict[str, Any]) -> list[list[str]]:
    """Of `requests` the rows that no other beats in both time and quality, against transformers too."""
    ratios = ["request, x transformers", "request, x full depth", "decoding, x full depth", "quality kept"]
    best = list[dict[str, Any]]()
    for row in sorted(document["runs"], key=lambda row: (-row["request_speedup"], -least_kept(row))):
        if not best or least_kept(row) > least_kept(best[-1]):
            best.append(row)
    layers = max(row["prompt_layers"] for row in document["runs"])
    return [
        ["layers of prompt tokens", "layers of new tokens", *ratios],
        *(
            [
                f"{row['prompt_layers']} of {layers}",
                f"{row['mean_layers']:.1f} of {layers} (nominal {nominal(row)})",
                f"{row['request_speedup_over_transformers']:.1f}x",
                times(row["request_speedup"]),
                times(row["decode_speedup"]),
                f"{least_kept(row):.1%}",
            ]
            for row in reversed(best)
        ),
    ]


def least_kept(row: dict[str, Any]) -> float:
    """The least of the shares of the scores that a row keeps."""
    return min(float(row["retained"][name]["share"]) for name in METRICS)


def nominal(row: dict[str, Any]) -> str:
    """The nominal speed-up."""
    return f"{row['nominal_speedup']:.1f}x".replace(".0x", "x") if row["nominal_speedup"] else "-"


def times(speedup: float | None) -> str:
    """A speed-up, where it was measured."""
    return f"{speedup:.2f}x" if speedup else "-"


def leads(document: dict[str, Any]) -> list[list[str]]:
    """By how much the best method of a nominal speed-up is ahead of each other one."""
    return [
        ["nominal", "best", "ahead of", *(f"{name}, points" for name in METRICS.values())],
        *(
            [
                f"{row['nominal_speedup']:g}x",
                row["best"],
                row["other"],
                *("{points:+.1f} [{low:.1f}, {high:.1f}]".format(**row["ahead"][name]) for name in METRICS),
            ]
            for row in document["leads"]
        ),
    ]


def scored(row: dict[str, Any], metric: str) -> str:
    """A score with half the width of its interval."""
    low, high = row["intervals"][metric]
    return f"{row[metric]:.1f} ± {(high - low) / 2:.1f}"


def kept(share: dict[str, float] | None) -> str:
    """A share with its interval, in percent."""
    return f"{share['share']:.1%} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]" if share else "-"


def chat(document: dict[str, Any]) -> list[list[str]]:
    """What each depth leaves of a base chat model, on prompts drawn from it and on others."""
    layers = {schedule["name"]: schedule["budgets"][0] for schedule in document["schedules"]}
    head = ["layers", "request", "request, batch 1", "decode", "KL", "same token", "perplexity of base model"]
    rows = [[*head, "instructions followed", "other prompts: KL", "perplexity of base model"]]
    for row, other in zip(document["rows"], document["other_prompts"]["rows"], strict=True):
        rows.append(
            [
                str(layers.get(row["name"], row["name"])),
                times(row.get("measured_speedup_with_prompt")),
                times(row.get("batch_1", {}).get("measured_speedup_with_prompt")),
                times(row.get("measured_speedup")),
                f"{row['kl']['estimate']:.3f}" if "kl" in row else "-",
                f"{row['top1_agreement']['estimate']:.1f}%" if "kl" in row else "-",
                "{estimate:.3f} [{low:.3f}, {high:.3f}]".format(**row["of_base"]),
                f"{row['instructions']['followed']:.1%}",
                f"{other['kl']['estimate']:.3f}" if "kl" in other else "-",
                "{estimate:.3f} [{low:.3f}, {high:.3f}]".format(**other["of_base"]),
            ]
        )
    return rows


def names(document: dict[str, Any]) -> list[list[str]]:
    """Names from outside the training records that come through, by checkpoint and prompts' layers."""
    speedups = sorted({round(row["nominal_speedup"]) for row in document["rows"]})
    found: dict[tuple[str, int], dict[int, float]] = {}
    for row in document["rows"]:
        found.setdefault((row["checkpoint"], row["prompt_layers"]), {})[round(row["nominal_speedup"])] = row["share"]
    return [
        ["checkpoint", "prompt layers", *(f"{speedup}x" for speedup in speedups)],
        *(
            [name, str(layers), *(f"{shares[s]:.0%}" if s in shares else "-" for s in speedups)]
            for (name, layers), shares in found.items()
        ),
    ]


def fitted(document: dict[str, Any]) -> list[list[str]]:
    """KL to full depth and equal tokens of each schedule without a fit, with simpler maps and with a fit."""
    methods = ["today", "bias", "patch", "fitted", "fitted, one tap"]
    speeds = document.get("speed", {}).get("rows", {})
    table = [["text", "prompt layers", "answer layers", "request", "no fit", *methods[1:]]]
    for setting in ("chat", "news", "e2e", "gemma3"):
        found: dict[str, dict[str, Any]] = {}
        for row in document.get(setting, {}).get("rows", ()):
            found.setdefault(row["schedule"]["name"], {})[row["method"]] = row
        for name, row in found.items():
            if name == "full":
                continue
            schedule = next(iter(row.values()))["schedule"]
            layers = len(schedule["prompt"]) if isinstance(schedule["prompt"], list) else schedule["num_layers"]
            timed = [speeds[f"{m}/{name}"] for m in methods if setting == "chat" and f"{m}/{name}" in speeds]
            request = times(timed[-1]["measured_speedup_with_prompt"] if timed else None)
            scores = (fidelity(row.get(method)) for method in methods)
            table.append([setting, str(layers), str(schedule["budgets"][-1]), request, *scores])
    return table


def fidelity(row: dict[str, Any] | None) -> str:
    """KL in nats and the share of equal tokens."""
    return f"{row['kl']['estimate']:.3f}, {row['equal_tokens']['estimate']:.0%}" if row else "-"


def products(document: dict[str, Any]) -> list[list[str]]:
    """Forwards of one prompt, and steps of a batch, against the machine's bf16 product and against bf16."""
    head = ["what", "weights", "ms", "GFLOP/s", "of the bf16 product", "x bf16"]
    return [
        head,
        *(
            [
                f"prompt of {row['tokens']}" if "tokens" in row else f"decode step of {row['batch']} sequences",
                row["weights"],
                f"{1000 * row['seconds']:.1f}",
                f"{row['gflop_s']:.0f}" if "gflop_s" in row else "-",
                f"{row['of_bf16_product']:.2f}" if "of_bf16_product" in row else "-",
                f"{row['over_bf16']:.2f}x",
            ]
            for row in document["rows"]
        ),
    ]


def predictions(document: dict[str, Any]) -> list[list[str]]:
    """Measured and predicted request speed-ups, by lengths and batch: the middle and the largest distance."""
    groups: dict[tuple[str, int, int, int], list[dict[str, Any]]] = {}
    for row in document["runs"]:
        groups.setdefault((row["lengths"], row["prompt_len"], row["new_tokens"], row["batch"]), []).append(row)
    rows = [["lengths", "batch", "request speed-ups measured", "prediction off by, median", "most"]]
    for (name, prompt, new, batch), group in groups.items():
        errors = sorted(abs(row["request_error"]) for row in group)
        gains = [row["request_speedup"] for row in group]
        span = f"{min(gains):.2f}x to {max(gains):.2f}x"
        middle = errors[len(errors) // 2]
        rows.append([f"{name}, {prompt} + {new}", str(batch), span, f"{middle:.1%}", f"{errors[-1]:.1%}"])
    return rows


def vllm(document: dict[str, Any]) -> list[list[str]]:
    """The vLLM plugin against stock vLLM in the same run: what was measured of it."""
    ratios = document["ratios"]
    what = {
        "full_depth_overhead": "the plugin at full depth: time a token",
        "lockstep_8_flat_2x": "8 sequences that start together, flat schedule, nominal 2x: tokens/s of decoding",
        "lockstep_8_nominal_2x": "8 sequences that start together, linear schedule, nominal 2x: tokens/s of decoding",
        "mixed_32_linear_2x": "96 requests at once, 32 slots, linear schedule, 2x: tokens/s with prompts",
        "poisson_flat_2x": "Poisson arrivals, 32 slots, flat schedule at 2x: requests/s at stock's p99 between tokens",
        "split_requests": "32 requests of 192 + 60 tokens, split schedule (prompts half the layers too): requests/s",
    }
    rows = [["what", "against stock, both eager", "against stock's default"]]
    for key, text in what.items():
        found = [ratios.get(f"{form}{key}") for form in ("", "default_")]
        if found != [None, None]:
            form = "{:+.1%}" if key == "full_depth_overhead" else "{:.2f}x"
            rows.append([text, *("not measured" if value is None else form.format(value) for value in found)])
    return rows


def vllm_versions(document: dict[str, Any]) -> list[list[str]]:
    """What the plugin's tests found on each vLLM."""
    rows = [["vLLM", "tests", "passed", "failed", "skipped", "seconds"]]
    for row in document["rows"]:
        found = [str(row[name]) for name in ("passed", "failed", "skipped", "seconds")]
        if row["not_run"]:
            found = [f"not run: {row['not_run']}", *"---"]
        rows.append([row["vllm"], f"`{row['tests']}`", *found])
    return rows


# By name, with the kind of result, or the benchmark, that each is made from.
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], list[list[str]]]]] = {
    "bench": ("bench", bench),
    "chat": ("self-generated", chat),
    "decode": ("decode-speed", decode),
    "fitted": ("fitted", fitted),
    "headline": ("quality-table", headline),
    "leads": ("quality-table", leads),
    "names": ("unseen-names", names),
    "predictions": ("prediction", predictions),
    "products": ("product-speed", products),
    "quality": ("quality-table", quality),
    "requests": ("quality-table", requests),
    "exact-head": ("head", exact_head),
    "same-tokens": ("head", same_tokens),
    "vllm": ("vllm-speed", vllm),
    "vllm-versions": ("vllm-versions", vllm_versions),
}


def markdown(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body]) + "\n"


def filled(page: str) -> str:
    """A page's text with every table written anew."""

    def table(match: re.Match[str]) -> str:
        kind, rows = TABLES[match[2]]
        document = read_result(ROOT / match[3])
        if document.get("benchmark", document["kind"]) != kind:
            raise SystemExit(f"{match[3]} is no result of {kind}")
        return match[1] + markdown(rows(document)) + match[4]

    return BLOCK.sub(table, page)


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
