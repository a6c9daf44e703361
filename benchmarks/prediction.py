"""Predicted beside measured: the speed-up of whole requests, and of decoding, under several schedules.

The model is SmolLM2-135M with the bundled adapter for E2E, bf16, on the fast engine. Rows have one length each: of E2E
(35 + 25 tokens) and of summaries of cut CNN/DailyMail articles (192 + 60), alone and 32 together. Schedules are the
paper's at nominal 2x, 3x and 5x with prompts at full depth, through the lowest 20, 15 and 10 layers, and `max_exit`.
Each and full depth take turns on the same rows, and the median of the rounds counts (`skipdecode.evaluation.methods`).
What is predicted comes from costs measured right before and after, in the same process, as `skipdecode plan` measures
them: it knows nothing of the runs. Nothing else should run meanwhile.

    python benchmarks/prediction.py --out results/request-prediction-smollm2-135m.json
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared import script_parser, write_result

from skipdecode import Schedule
from skipdecode.common.progress import note, progress_bar
from skipdecode.cost.measure import CostMeter
from skipdecode.cost.model import CostModel
from skipdecode.engine.opening import Backend, open_engines
from skipdecode.engine.scheduler import PROMPT_TOKENS
from skipdecode.evaluation.methods import ROUNDS, WHAT, Method, speed_entries, time_equal_lengths
from skipdecode.evaluation.results import EvaluationSettings
from skipdecode.models.families import unwrap
from skipdecode.models.loading.hub import load_model

LENGTHS = {"e2e": (35, 25), "cnn_dm": (192, 60)}
PROMPTS = ("full", 20, 15, 10, "max_exit")


def schedules(layers: int, new_tokens: int, speedups: Sequence[float], prompts: Sequence[Any]) -> list[Schedule]:
    """The paper's, with every prompt set."""
    sets = [tuple(range(p)) if isinstance(p, int) else p for p in prompts]
    return [
        Schedule.from_speedup(layers, nominal, new_tokens - 1, prompt=prompt) for nominal in speedups for prompt in sets
    ]


def cell(source: Backend, lengths: str, batch: int, chosen: Sequence[Schedule]) -> list[dict[str, Any]]:
    """The runs of one length and batch."""
    prompt_len, new_tokens = LENGTHS[lengths]
    rows = max(batch, 4)
    # Texts say nothing: what counts is how long they are. No two begin alike.
    prompts = [[3 + (7 * i + j) % 50 for j in range(prompt_len)] for i in range(rows)]
    forwards = (prompt_len, min(batch * prompt_len, PROMPT_TOKENS))
    meter = CostMeter(source, rows={1, batch}, prompt_len=prompt_len, prompts=forwards)
    methods = [Method(source), *(Method(source, schedule) for schedule in chosen)]
    meter.run(3, 0.1)
    with progress_bar(ROUNDS * rows, "row", name=f"{lengths} x {batch}") as bar:
        lengths_of = [new_tokens] * rows
        turns = time_equal_lengths(methods, prompts, lengths_of, batch_size=batch, progress=bar.update)
    meter.run(3, 0.1)
    cost = meter.cost()
    about = {"lengths": lengths, "batch": batch, "prompt_len": prompt_len, "new_tokens": new_tokens}
    speeds = [speed_entries(turns, method, methods[0], EvaluationSettings(), {}) for method in methods[1:]]
    tokens = prompt_len, new_tokens
    return [row(cost, schedule, tokens, speed) | about for schedule, speed in zip(chosen, speeds, strict=True)]


def row(cost: CostModel, schedule: Schedule, tokens: tuple[int, int], found: dict[str, Any]) -> dict[str, Any]:
    """Predicted beside measured; seconds are of a batch's requests."""
    request, decode = cost.text(*tokens, whole=True), cost.text(*tokens)
    layer, projection = cost.prompt_layer_seconds(PROMPT_TOKENS)
    return {
        "prompt_layers": len(schedule.prompt_layers()),
        "prompt": schedule.prompt if isinstance(schedule.prompt, str) else "lowest",
        "nominal_speedup": schedule.nominal_speedup,
        "request_speedup": found["request_speedup"],
        "predicted_request_speedup": request.speedup(schedule),
        "request_error": request.speedup(schedule) / found["request_speedup"] - 1,
        "decode_speedup": found["decode_speedup"],
        "predicted_decode_speedup": decode.speedup(schedule),
        "decode_error": decode.speedup(schedule) / found["decode_speedup"] - 1,
        "projection_share": projection / layer if layer else None,
        "residual": cost.residual,
        "ms_per_step": found["speed"]["ms_per_position"],
        "full_ms_per_step": found["full_depth_speed"]["ms_per_position"],
        "predicted_ms_per_step": 1e3 * decode.seconds(schedule) / (tokens[1] - 1),
        "predicted_full_ms_per_step": 1e3 * decode.full_seconds / (tokens[1] - 1),
        "seconds": found["speed"]["seconds"],
        "full_seconds": found["full_depth_speed"]["seconds"],
        "predicted_seconds": request.seconds(schedule),
        "predicted_full_seconds": request.full_seconds,
    }


def main() -> None:
    """Measure and write."""
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="e2e-smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lengths", nargs="+", default=list(LENGTHS), choices=LENGTHS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--speedups", type=float, nargs="+", default=[2, 3, 5])
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    loaded = load_model(options.model, dtype=options.dtype)
    source = open_engines(loaded.model, "fast", note)
    layers = unwrap(loaded.model).config.num_hidden_layers
    for lengths in options.lengths:
        for batch in options.batches:
            chosen = schedules(layers, LENGTHS[lengths][1], options.speedups, PROMPTS)
            runs += cell(source, lengths, batch, chosen)
            worst = max(abs(run["request_error"]) for run in runs[-len(chosen) :])
            note(f"{lengths}, batch {batch}: request speed-ups within {worst:.1%}")
    found = {
        "what": WHAT,
        "rounds": ROUNDS,
        "engine": source.name,
        "worst_request_error": max(abs(run["request_error"]) for run in runs),
        "worst_decode_error": max(abs(run["decode_error"]) for run in runs),
        "runs": runs,
    }
    write_result(options.out, "prediction", found, options)


if __name__ == "__main__":
    main()
