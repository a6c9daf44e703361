"""Decoding speed of engines and schedules on one model, in one process, next to the limit of the machine.

All engines run in turn; results are medians. In each round every engine runs once under each schedule, with greedy
decoding and no end token. A step takes at least the time of its bytes (weights of the layers that run, head, cache) at
the bandwidth of a large read, and of its operations at the rate of a large product in the type that the engine
multiplies; both rates are measured in the round, because other users of a machine change its speed.

    python benchmarks/speed.py smollm2-135m --engines fast transformers --out result.json
    python benchmarks/speed.py --geometry opt-1.3b --batches 1 8 --new 32 --out result.json

fast, fast-int8, fast-w8a8: this package's engine, with the model's weights or quantized ones; gated: transformers with
schedules. The others run full depth: transformers, transformers-static (transformers' generate with its dynamic or its
static cache), prompt-lookup, early-exit (transformers' drafts from the prompt, or from the first third of the layers:
batches of one, and a speed that depends on the text). llama.cpp and vLLM: see `peers.py`.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import held_bytes, measure_bandwidth, measure_products, step_bytes, step_flops
from shared import script_parser, write_json
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteriaList

from skipdecode.common.bootstrap import Stopwatch
from skipdecode.common.environment import environment, limit_threads
from skipdecode.common.jsonl import heading
from skipdecode.common.progress import progress_bar, quiet
from skipdecode.common.tables import figures
from skipdecode.cost.geometry import ModelGeometry
from skipdecode.cost.measure import Shape, open_engine
from skipdecode.cost.model import CostModel
from skipdecode.engine.fast_model import open_model
from skipdecode.engine.opening import Backend
from skipdecode.errors import SkipDecodeError, UnfitModelError, UsageError
from skipdecode.generation.speed import Generation, Method
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.hub import choose_device, load_model
from skipdecode.schedule import Schedule

PACKAGE = ("fast", "fast-int8", "fast-w8a8", "gated")
OTHERS = ("transformers", "transformers-static", "prompt-lookup", "early-exit")
GEOMETRIES: dict[str, dict[str, Any]] = {
    "opt-1.3b": {
        "model_type": "opt",
        "hidden_size": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "vocab_size": 50272,
        "word_embed_proj_dim": 2048,
    },
    "opt-6.7b": {
        "model_type": "opt",
        "hidden_size": 4096,
        "ffn_dim": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 50272,
        "word_embed_proj_dim": 4096,
    },
}
"""Sizes of real models, for measurements with random weights: the time of a step does not depend on the weights."""
_BASELINES = ("transformers", "gated")
_DRAFT_TOKENS = 10  # transformers' own example
_TOKEN = 5


# ---------------------------------------------------------------------- what is timed


class Package(Method):
    """An engine of this package, whose prompts run in one forward, so that the sequences stay together."""

    def __init__(self, backend: Backend, schedule: Schedule, longest: int) -> None:
        super().__init__(backend, schedule)
        self._longest = longest

    def make_engine(self, max_rows: int) -> Any:
        return open_engine(self.backend, self.schedule, Shape(max_rows, self._longest, 1))


class TokenClock:
    """A stopping criterion that never stops; it records the time after every token."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        # Drafting methods add several tokens at once.
        self.times += [time.perf_counter()] * (input_ids.shape[1] - len(self.times))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Generated(Method):
    """transformers' own `generate` at full depth, of all prompts together; `options` are further arguments of it."""

    def __init__(self, model: Any, name: str = "transformers", **options: Any) -> None:
        super().__init__(Backend(model, name=name), name=name)
        self._model, self._options = model, options

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int | Sequence[int], eos: set[int], rows: int = 0
    ) -> Generation:
        most = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self._model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._model.device)
        clock, start = TokenClock(self._model.device), time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(most),
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                eos_token_id=sorted(eos) or None,
                pad_token_id=min(eos, default=0),
                stopping_criteria=StoppingCriteriaList([clock]),
                **self._options,
            )
        clock(output, None)  # the tokens after the last call, if any
        end, first = time.perf_counter(), clock.times[width]
        tokens = [_until_end(row[:n], eos) for row, n in zip(output[:, width:].tolist(), most, strict=True)]
        fed = sum(map(len, tokens)) - len(tokens)
        layers = fed * self.backend.num_layers
        return Generation(tokens, first - start, end - first, layers, fed, max(map(len, tokens)) - 1)


def _until_end(row: list[int], eos: set[int]) -> list[int]:
    return row[: next((i for i, token in enumerate(row) if token in eos), len(row) - 1) + 1]


def opened(name: str, model: Any) -> Backend | Method:
    """A backend of this package, or one of `OTHERS`; raises UsageError if it is not known or cannot run the model."""
    layers = len(decoder_layers(unwrap(model)))
    options = {
        "transformers": {},
        "transformers-static": {"cache_implementation": "static"},
        "prompt-lookup": {"prompt_lookup_num_tokens": _DRAFT_TOKENS},
        "early-exit": {"assistant_early_exit": max(1, layers // 3)},
    }
    if name in options:
        return Generated(model, name, **options[name])
    if name not in PACKAGE:
        raise UsageError(f"engine {name!r} is not known: accepted are {', '.join((*PACKAGE, *OTHERS))}")
    if name == "gated":
        return Backend(model, name=name)
    kind: Any = name.partition("-")[2] or None
    try:
        return Backend(model, open_model(model, kind))
    except UnfitModelError as e:
        raise UsageError(f"the engine {name!r} does not cover this model: {e}; leave it out of --engines") from None


class Run(NamedTuple):
    """What is timed, and its nominal speed-up."""

    method: Method
    nominal: float


class Lap(NamedTuple):
    """Of a round: seconds of a run's steps and prompts, bandwidth, rate of products."""

    steps: float
    prompts: float
    bandwidth: float
    products: float

    @property
    def request(self) -> float:
        """Seconds of prompts and steps together."""
        return self.steps + self.prompts


# ---------------------------------------------------------------------- measurement


def runs_of(model: Any, engines: Sequence[str], nominal: Sequence[float], steps: int, longest: int) -> list[Run]:
    """Full depth of every engine, and the paper's schedules of the engines of this package."""
    schedules = {
        n: Schedule.from_speedup(len(decoder_layers(unwrap(model))), n, steps) for n in sorted(set(nominal)) if n > 1
    }
    found = []
    for name in dict.fromkeys(engines):
        side = opened(name, model)
        if isinstance(side, Method):
            found.append(Run(side, 1.0))
        else:
            full = Schedule.full(side.num_layers)
            found += [Run(Package(side, s, longest), n) for n, s in ({1.0: full} | schedules).items()]
    return found


def measure(runs: Sequence[Run], batches: Sequence[int], prompts: Sequence[int], new: int, rounds: int) -> Any:
    """The rows of the result, one for each batch, prompt length and run, and the rates of the machine."""
    model = runs[0].method.backend.model
    geometry = ModelGeometry.from_config(model.config, model.dtype.itemsize)
    sizes = [Shape(batch, prompt, new) for batch in dict.fromkeys(batches) for prompt in dict.fromkeys(prompts)]
    dtype, backends = str(model.dtype).removeprefix("torch."), [run.method.backend for run in runs]
    kinds = {each.name: "w8a8" if each.weights == "w8a8" else dtype for each in backends}
    rows: list[dict[str, Any]] = []
    with progress_bar(len(sizes) * len(runs) * rounds, "run") as bar:
        for shape in sizes:
            watch = Stopwatch[Run, Lap](runs)
            texts, lengths = [[_TOKEN] * shape.prompt] * shape.batch, [new] * shape.batch
            for run in runs:
                run.method.generate(texts, max_new_tokens=lengths, eos=set())  # the first run of some compiles
            for _ in range(rounds):
                rates = {kind: measure_products(kind, model.device) for kind in set(kinds.values())}
                reads = [measure_bandwidth(model.device)]

                def lap(
                    run: Run, texts: Any = texts, lengths: Any = lengths, rates: Any = rates, reads: Any = reads
                ) -> Lap:
                    found = run.method.generate(texts, max_new_tokens=lengths, eos=set())
                    reads.append(measure_bandwidth(model.device))
                    bar.update()
                    products = rates[kinds[run.method.backend.name]]
                    return Lap(found.decode_seconds, found.prompt_seconds, sum(reads[-2:]) / 2, products)

                watch.lap(lap)
            rows += [row_of(geometry, shape, watch, run) for run in runs]
    products: dict[str, list[float]] = {}
    for row in rows:
        products.setdefault(kinds[row["engine"]], []).extend(row["products_gflop_s"])
    return {
        "bandwidth_gb_s": statistics.median(b for row in rows for b in row["bandwidth_gb_s"]),
        "products_gflop_s": {kind: statistics.median(rates) for kind, rates in products.items()},
        "rows": rows,
    }


def row_of(geometry: ModelGeometry, shape: Shape, watch: Stopwatch[Run, Lap], run: Run) -> dict[str, Any]:
    """The figures of a run."""
    steps, backend, laps, batch = shape.new - 1, run.method.backend, watch.laps(run), shape.batch
    full = {side.method.backend.name: side for side in watch.sides if side.nominal == 1}
    baseline = next((full[name] for name in _BASELINES if name in full), None)
    own = full[backend.name]
    model = unwrap(backend.model)
    held = held_bytes(backend.fast, batch) if backend.fast else step_bytes(model, geometry, batch)
    work = step_flops(model, geometry, batch)
    reads, flops = (CostModel.of_step(geometry.num_layers, batch, *parts) for parts in (held, work))
    schedule = run.method.schedule
    read, operations = (cost.text(*shape[1:]).seconds(schedule) / steps for cost in (reads, flops))
    limits = [(read / lap.bandwidth, operations / lap.products) for lap in laps]
    median = watch.seconds(run, lambda lap: lap.steps)
    return {
        "engine": backend.name,
        "weights": backend.weights,
        **shape._asdict(),
        "nominal_speedup": run.nominal,
        "mean_layers": schedule.mean_budget(steps),
        "request_speedup": watch.ratio(own, run, lambda lap: lap.request),
        "request_speedup_over_transformers": baseline and watch.ratio(baseline, run, lambda lap: lap.request),
        "decode_tokens_per_s": batch * steps / median,
        "ms_per_step": median / steps * 1e3,
        "decode_speedup": watch.ratio(own, run, lambda lap: lap.steps),
        "speedup_over_transformers": baseline and watch.ratio(baseline, run, lambda lap: lap.steps),
        "amdahl_bound": reads.text(*shape[1:]).speedup(schedule),
        "bytes_per_step": read,
        "flops_per_step": operations,
        "limit": "bytes" if statistics.median(a / b for a, b in limits) >= 1 else "arithmetic",
        "roofline_share": statistics.median(
            max(wall) / (lap.steps / steps) for lap, wall in zip(laps, limits, strict=True)
        ),
        "seconds": [lap.steps for lap in laps],
        "prompt_seconds": [lap.prompts for lap in laps],
        "bandwidth_gb_s": [lap.bandwidth / 1e9 for lap in laps],
        "products_gflop_s": [lap.products / 1e9 for lap in laps],
    }


# ---------------------------------------------------------------------- the command

_COLUMNS = {
    "engine": "{engine}",
    "batch": "{batch}",
    "prompt": "{prompt}",
    "nominal": "{nominal_speedup:g}x",
    "layers": "{mean_layers:.1f}",
    "request": "{request_speedup:.2f}x",
    "decode": "{decode_speedup:.2f}x",
    "tokens/s": "{decode_tokens_per_s:.1f}",
    "byte bound": "{amdahl_bound:.2f}x",
    "x transformers": "{speedup_over_transformers:.2f}x",
    "of limit": "{roofline_share:.0%}",
    "ms/step": "{ms_per_step:.2f}",
    "limit": "{limit}",
}


def build(geometry: str, dtype: torch.dtype, device: Any = "cpu") -> Any:
    """A causal LM of one of `GEOMETRIES` with random weights, created on the device, in eval mode."""
    values = dict(GEOMETRIES[geometry])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def loaded(options: argparse.Namespace) -> Any:
    """The model; an adapter is merged into its weights."""
    if options.geometry:
        return build(options.geometry, getattr(torch, options.dtype), choose_device(options.device))
    asked = {"dtype": options.dtype, "device": options.device}
    return merge_adapter(load_model(options.model, require_tokenizer=False, **asked).model)


def main(argv: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("model", nargs="?", help="as for skipdecode generate")
    parser.add_argument("--geometry", choices=GEOMETRIES, help="in place of a model: these sizes with random weights")
    parser.add_argument("--engines", nargs="+", default=["fast", "transformers"], choices=(*PACKAGE, *OTHERS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="sequences decoded together")
    parser.add_argument("--prompt", type=int, nargs="+", default=[64], help="prompt tokens of a sequence")
    parser.add_argument("--new", type=int, default=128, help="new tokens of a sequence")
    parser.add_argument("--nominal", type=float, nargs="+", default=[2, 3, 5], help="nominal speed-ups, beside 1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", help="torch device (default: the first GPU if there is one, else cpu)")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(argv)
    if bool(options.model) == bool(options.geometry):
        parser.error("give either a model or --geometry")
    limit_threads()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        with quiet():
            runs = runs_of(loaded(options), options.engines, options.nominal, options.new - 1, max(options.prompt))
            found = measure(runs, options.batches, options.prompt, options.new, options.rounds)
    except SkipDecodeError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return error.exit_code
    words = shlex.join(["python", "benchmarks/speed.py", *(sys.argv[1:] if argv is None else argv)])
    about = {key: value for key, value in vars(options).items() if key != "out"} | {"command": words}
    write_json(options.out, heading("bench") | {"environment": environment(), "config": about} | found)
    rates = "".join(f", products in {kind}: {rate:.0f} GFLOP/s" for kind, rate in found["products_gflop_s"].items())
    print(
        "\n".join(figures(_COLUMNS, found["rows"])),
        "",
        f"large read: {found['bandwidth_gb_s']:.1f} GB/s{rates}",
        sep="\n",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
