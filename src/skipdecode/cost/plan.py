"""Plans: the schedule for a speed target on this machine, with the speed and the memory to expect."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skipdecode.common.environment import isolated_torch
from skipdecode.common.tables import Printed, byte_size, speedups
from skipdecode.cost.geometry import ModelGeometry
from skipdecode.cost.model import CostModel
from skipdecode.cost.solve import Auto, PlanOptions, solve
from skipdecode.cost.source import CostSource, find_cost
from skipdecode.errors import UsageError
from skipdecode.models.families import check_schedule, lent_last, projects
from skipdecode.models.fit import Fit
from skipdecode.models.loading.checkpoint import Checkpoint, Model, open_checkpoint
from skipdecode.schedule import PromptDepth, Schedule
from skipdecode.schedule.grammar import schedule_picture
from skipdecode.schedule.order import bottom_up, prompt_set, top_down

_WIDTH, _SHOWN_ORDER = 80, 12


@isolated_torch()
def plan(
    model: Model,
    schedule: Schedule | str | Path | None = None,
    *,
    dtype: str = "auto",
    device: str | None = None,
    engine: str = "auto",
    quantization: str = "none",
    **options: Any,
) -> Plan:
    """Find the schedule for a speed target, or predict the speed of a schedule. Nothing is generated.

    The model is loaded, and its prompts and decode steps are timed; the times are kept for later calls.

    Parameters
    ----------
    model : str, Path, LoadedModel or LLM
        A name as for `skipdecode.load`, the result of `load`, or an LLM.
    schedule : Schedule, str or Path, optional
        The schedule to assess, or its text (`skipdecode.schedule.grammar`), such as "2x:p15"; or give `target_speedup`.
        A fit beside a schedule file, or of the checkpoint, is counted.
    dtype, device, engine, quantization
        As for `skipdecode.LLM`.
    **options
        Fields of `PlanOptions`: target_speedup, prompt_layers, flat, seq_len, batch, prompt_len, remeasure.

    Raises
    ------
    TargetError
        No schedule reaches the target; the message has the bound and its cause.
    SkipDecodeError
        The model does not load, or a value is not accepted.
    """
    settings = PlanOptions(**options)
    if (schedule is None) == (settings.target_speedup is None):
        raise UsageError("give one of `target_speedup` and `schedule`")
    if schedule is not None and (settings.prompt_layers is not None or settings.flat):
        raise UsageError("`prompt_layers` and `flat` are for a target: write :p15 or :flat behind the schedule")
    checkpoint = open_checkpoint(model, schedules=[schedule])
    geometry = ModelGeometry.from_config(checkpoint.config)

    known = None if schedule is None else checkpoint.parse(schedule, settings.seq_len)
    bare = CostModel.of_step(geometry.num_layers, settings.batch, 0.0, 1.0)
    check_schedule(checkpoint.config, _solved(settings, bare, 1.0, checkpoint))  # refuses what does not fit
    fit = _fit(checkpoint, geometry, known)
    timed = {name: getattr(settings, name) for name in ("batch", "prompt_len", "remeasure")}
    source = find_cost(checkpoint, dtype=dtype, device=device, engine=engine, quantization=quantization, **timed)
    if fit is not None:
        source = replace(source, cost=source.cost.with_fit(source.geometry, fit.rank, fit.context_tokens))
    solution = known or _solved(settings, source.cost, settings.target_speedup or 1.0, checkpoint)
    figures = assess(solution, source.cost, source.geometry, settings.prompt_len, settings.new_tokens)
    return Plan(settings, checkpoint, source, solution, figures, fit)


def _solved(options: PlanOptions, cost: CostModel, target: float, checkpoint: Checkpoint) -> Schedule:
    """The schedule of the options under a cost, in the paper's order as far as the model's layers allow."""
    layers, config = cost.num_layers, checkpoint.config
    prompt: PromptDepth | Auto = "auto" if projects(config) else "full"
    if options.prompt_layers is not None:
        prompt = prompt_set(options.prompt_layers, layers)
    return solve(
        cost,
        target,
        options.seq_len,
        prompt=prompt,
        flat=options.flat,
        drop_order=lent_last(config, Schedule.constant(layers, layers)).drop_order,
        prompt_len=options.prompt_len,
    )


def _fit(checkpoint: Checkpoint, geometry: ModelGeometry, schedule: Schedule | None) -> Fit | None:
    """The fit beside the schedule, else the fit of the checkpoint, if there is one; it is not compared with weights."""
    if checkpoint.fit is None:
        return None
    file = checkpoint.fit.file
    fit = Fit.load(file)
    fit.check_sizes(geometry.hidden_size, geometry.keys, f"fit {file}")
    if schedule is not None and checkpoint.schedule_files:
        fit.check_prompts(schedule, f"fit {file}")
    return fit


@dataclass(frozen=True)
class Plan(Printed):
    """A schedule with the figures that are predicted for it; prints itself as a picture and a table.

    Attributes
    ----------
    schedule : Schedule
    figures : mapping of str to float
        See `assess`.
    source : CostSource
        The cost model of the machine, and its origin.
    """

    options: PlanOptions
    checkpoint: Checkpoint
    source: CostSource
    schedule: Schedule
    figures: Mapping[str, float]
    fit: Fit | None = None

    @property
    def tuned(self) -> bool:
        """Whether the weights were tuned for the schedule; nothing is downloaded to find out."""
        return self.schedule.fits_weights(self.checkpoint.tuned_under)

    @property
    def fit_bytes(self) -> float:
        """Bytes of the fit in memory, in the type of the weights."""
        numbers = () if self.fit is None else self.fit.parameters()
        return sum(p.numel() for p in numbers) * self.source.geometry.dtype_bytes

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        options, source = self.options, self.source
        return {
            "model": self.checkpoint.name,
            **{name: getattr(options, name) for name in ("batch", "prompt_len", "new_tokens")},
            "dtype": source.dtype,
            "weight_bytes": source.geometry.weight_bytes(),
            "fit_bytes": self.fit_bytes,
            "schedule": self.schedule.to_dict(),
            "figures": dict(self.figures),
            "tuned": self.tuned,
            "cost": source.cost.to_dict(),
            "cost_origin": source.origin,
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = _WIDTH) -> str:
        """The picture and the report in lines of at most `width` characters; see `schedule_picture`."""
        figures = self.figures
        gains = {name: figures[f"{name}_speedup"] for name in ("request", "decode", "nominal")}

        def filled(entries: dict[str, str]) -> list[str]:
            lines = (f"{name:<10}{text}" for name, text in entries.items())
            return [textwrap.fill(line, width, subsequent_indent=" " * 10) for line in lines]

        table = speedups(["predicted"], {name: [f"{gain:.2f}x"] for name, gain in gains.items()})
        picture = schedule_picture(self.schedule, self.options.seq_len, width=min(_WIDTH, width))
        return "\n".join([picture, *filled(self._subject()), "", *table, "", *filled(self._details())])

    def _subject(self) -> dict[str, str]:
        options, schedule, geometry = self.options, self.schedule, self.source.geometry
        first, last = schedule.budgets[0], schedule.budgets[-1]
        depth = f"{first}" if first == last else f"{first} decreasing to {last}"
        prompts = f"{len(schedule.prompt_layers())} of {schedule.num_layers} layers"
        if schedule.projected:
            prompts += f", and only keys and values of {len(schedule.projected)} more that the first new token runs"
        if options.target_speedup is not None and options.prompt_layers is None:
            prompts += (
                "; rule: new tokens skip layers first, down to half depth, then prompts, if that pays, down to half "
                "depth, then both (prompt layers can be given; prepare measures which are best)"
            )
        return {
            "model": f"{self.checkpoint.name}: {geometry.num_layers} layers, {byte_size(geometry.weight_bytes())} of "
            f"weights in {self.source.dtype}",
            "for": f"{options.batch} x ({options.prompt_len} prompt + {options.new_tokens} new tokens); "
            f"the first new token comes with the prompt, the others from {options.seq_len} decode steps",
            "schedule": f"{schedule.name}: {depth} of {schedule.num_layers} layers, skipped {_order(schedule)}",
            "prompts": prompts,
        }

    def _details(self) -> dict[str, str]:
        figures = self.figures
        mean = self.schedule.num_layers / figures["nominal_speedup"]
        names = ("request_seconds", "request_seconds_full", "step_seconds", "step_seconds_full")
        request, request_full, step, step_full = (_time(figures[name]) for name in names)
        held, saved = figures["kv_bytes_held"], figures["kv_bytes_saved"]
        return {
            "limits": f"request at most {figures['request_bound']:.2f}x with these prompts; decode at most "
            f"{figures['bound']:.2f}x with {figures['least_budget']} layers, the fewest",
            "request": f"{request_full} at full depth, {request} with the schedule, of which prompts take "
            f"{figures['prompt_share']:.0%}",
            "step": f"{step_full} at full depth, of which {figures['fixed_share']:.0%} cannot be skipped; {step} with "
            f"{mean:.1f} layers, the mean",
            "KV cache": f"{byte_size(held)} at the end; {byte_size(saved)} ({saved / ((held + saved) or 1):.0%}) saved",
            **({} if self.fit is None else {"fit": self._fitted(self.fit)}),
            "times": self.source.origin,
        }

    def _fitted(self, fit: Fit) -> str:
        """The memory and time of the fit."""
        cost = self.source.cost
        text = f"{byte_size(self.fit_bytes)} in memory; maps of rank {fit.rank:.0f} over {len(fit.bridges)} layers, "
        text += f"each {cost.bridge_share:.1%} of the layer that a token skips"
        if self.schedule.projected:
            text += f"; keys and values of prompts take {1 + cost.taps} projection{'s' if cost.taps else ''} a layer"
        return text + "; all figures include it"


def _order(schedule: Schedule) -> str:
    """The drop order in words."""
    order, warmup = schedule.drop_order, schedule.warmup_layers
    for name, known in (("bottom-up", bottom_up), ("top-down", top_down)):
        if order == known(schedule.num_layers, warmup)[: len(order)]:
            return name
    shown = " ".join(map(str, order[:_SHOWN_ORDER]))
    return f"in the order {shown}" + (" …" if len(order) > _SHOWN_ORDER else "")


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def assess(
    schedule: Schedule, cost: CostModel, geometry: ModelGeometry, prompt_len: int, new_tokens: int
) -> dict[str, float]:
    """Predicted figures for a batch of sequences of `prompt_len` prompt and `new_tokens` (2 or more) new tokens.

    Speed-ups over full depth: `nominal_speedup` (layers of the model / mean layers of a token over the decode phase),
    `decode_speedup` and `request_speedup`; `bound` and `request_bound` are the last two with `least_budget`, the fewest
    layers that the drop order allows. Seconds under the schedule and at full depth: `request_seconds` and
    `request_seconds_full` of the batch's requests (`prompt_share` of the former is for prompts), `step_seconds` and
    `step_seconds_full` of the mean step (`fixed_share` of the latter cannot be skipped). Bytes of keys and values at
    the end, and those that full depth would hold in addition: `kv_bytes_held`, `kv_bytes_saved`.
    """
    full, steps = Schedule.full(cost.num_layers), new_tokens - 1
    texts, requests = (cost.text(prompt_len, new_tokens, whole=whole) for whole in (False, True))
    decode, request = texts.seconds(schedule), requests.seconds(schedule)
    least = max(1, cost.num_layers - len(schedule.drop_order))
    shortest = replace(schedule, budgets=(least,))
    held, held_full = (geometry.kv_bytes_held(s, prompt_len, new_tokens, cost.batch) for s in (schedule, full))
    return {
        "nominal_speedup": cost.num_layers / schedule.mean_budget(steps),
        "decode_speedup": texts.full_seconds / decode,
        "request_speedup": requests.full_seconds / request,
        "request_bound": requests.speedup(shortest),
        "request_seconds": request,
        "request_seconds_full": requests.full_seconds,
        "prompt_share": requests.prompts_seconds(schedule) / request,
        "step_seconds": decode / steps,
        "step_seconds_full": texts.full_seconds / steps,
        "bound": texts.speedup(shortest),
        "least_budget": least,
        "fixed_share": steps * cost.step.fixed_seconds / texts.full_seconds,
        "kv_bytes_held": held,
        "kv_bytes_saved": held_full - held,
    }
