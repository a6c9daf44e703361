"""Fits a model's bridges and prompt maps by least squares, in one sweep from the bottom layer to the top.

Full depth's states and those of the skipping model advance together, a layer at a time. A bridge takes the skipping
model's state to full depth's next state, so later bridges correct what earlier ones missed; one bridge serves every
depth at which its layer is out. A prompt map takes the state that passes by to full depth's keys and values. All sums
are fp64 and of one pass, and solved with a ridge that held-out batches choose. docs/theory.md has the derivation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skipdecode.calibration.settings import FitOptions
from skipdecode.errors import FitError
from skipdecode.models.families import decoder_layers, find_family, unwrap
from skipdecode.models.fit import Bridge, Fit, PromptMap, normed, with_taps
from skipdecode.models.gate import calling, projection
from skipdecode.schedule import Schedule
from skipdecode.tuning.collate import Batch

__all__ = ["fit_model"]

_RIDGES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""Of the mean diagonal of the states' products."""
_DEPTHS = 4
"""Most depths of a falling schedule at which its bridges are fitted."""
_HELD_OUT = 5
"""Every so many batches one is held out, to choose the ridge."""


def fit_model(
    model: Any,
    schedules: Sequence[Schedule],
    batches: Sequence[Batch],
    options: FitOptions,
    advance: Callable[[], object] = lambda: None,
) -> Fit:
    """The fit of a model for one or more schedules of one drop order.

    Memory grows with the tokens of `batches` x hidden_size x (depths + 1), the states of one layer.

    Parameters
    ----------
    model : transformers causal LM
        At full depth, with nothing attached.
    schedules : sequence of Schedule
        Their prompt sets get maps, and the layers that they skip get bridges.
    batches : sequence of Batch
        Texts at full depth: prompts and answers, aligned.
    advance : callable
        Told after each layer.

    Raises
    ------
    FitError
        Fewer tokens than a map has inputs, or a family that makes keys and values together with queries.
    """
    with torch.inference_mode():
        return _Sweep(model, schedules, batches, options).run(advance)


class _Sums:
    """Sums of products of inputs (tokens, features), with a 1 behind each, and targets (tokens, outputs)."""

    def __init__(self, features: int, outputs: int) -> None:
        self.tokens = 0
        self.gram = torch.zeros(2, features + 1, features + 1, dtype=torch.float64)
        self.cross = torch.zeros(2, features + 1, outputs, dtype=torch.float64)

    def add(self, inputs: Tensor, targets: Tensor, scale: Tensor, held_out: bool) -> None:
        """Take in tokens, weighted by 1 / the mean square of `scale` (tokens, any)."""
        weight = torch.rsqrt(scale.double().square().mean(-1, keepdim=True) + 1e-12)
        x = torch.cat((inputs.double(), torch.ones_like(weight)), 1) * weight
        self.gram[int(held_out)] += x.T @ x
        self.cross[int(held_out)] += x.T @ (targets.double() * weight)
        self.tokens += len(inputs)

    def solve(self) -> tuple[Tensor, Tensor]:
        """Weights (outputs, features) and bias (outputs,) with the ridge that held-out tokens favour."""
        if self.tokens < self.gram.shape[1]:
            raise FitError(
                f"{self.tokens} tokens are too few to fit a map of {self.gram.shape[1] - 1} inputs: give more records, "
                "or fewer taps"
            )
        ridge = _RIDGES[2] if not self.gram[1].any() else min(_RIDGES, key=self._held_out_loss)
        solution = self._solution(self.gram.sum(0), self.cross.sum(0), ridge)
        return solution[:-1].T, solution[-1]

    def second_moments(self) -> Tensor:
        """Products of the inputs, (features, features)."""
        return self.gram.sum(0)[:-1, :-1]

    def _held_out_loss(self, ridge: float) -> float:
        made = self._solution(self.gram[0], self.cross[0], ridge)
        return float((made * (self.gram[1] @ made - 2 * self.cross[1])).sum())

    @staticmethod
    def _solution(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
        penalty = torch.full((len(gram),), ridge * float(gram.diagonal()[:-1].mean()), dtype=gram.dtype)
        penalty[-1] = 0
        return torch.linalg.solve(gram + penalty.diag(), cross)  # type: ignore[no-any-return]


class _Sweep:
    """Every batch's states before the layer at work: of full depth, of prompts and of each depth."""

    def __init__(
        self, model: Any, schedules: Sequence[Schedule], batches: Sequence[Batch], options: FitOptions
    ) -> None:
        plain = unwrap(model)
        self._layers: list[Any] = list(decoder_layers(plain))
        self._tuples = find_family(plain).returns_tuple
        self._width = int(plain.config.get_text_config(decoder=True).hidden_size)
        self._options, self._batches = options, [batch.to(plain.device) for batch in batches]
        self._calls = [_layer_calls(plain, self._layers, self._tuples, batch) for batch in self._batches]
        self._full = [calls.embedded for calls in self._calls]
        self._depths = _depths(schedules)
        # Under "max_exit" prompt tokens skip what position 0 skips, and take its bridges.
        self._whole = all(schedule.prompt == "max_exit" for schedule in schedules)
        self._answers = {depth: list(self._full) for depth in self._depths}
        self._sets = {s.prompt_layers(): set[int]() for s in schedules if s.projected}
        for schedule in schedules:
            if schedule.projected:
                self._sets[schedule.prompt_layers()] |= set(schedule.projected)
        self._prompts = {layers: list(self._full) for layers in self._sets}
        self._bridges: dict[int, Bridge] = {}
        self._maps: dict[tuple[int, ...], dict[int, PromptMap]] = {layers: {} for layers in self._sets}

    def run(self, advance: Callable[[], object]) -> Fit:
        for index in range(len(self._layers)):
            wanted = [layers for layers, projected in self._sets.items() if index in projected]
            after, keys = self._full_depth(index, bool(wanted))
            for layers in wanted:
                self._maps[layers][index] = self._prompt_map(layers, keys)
            self._advance_prompts(index, after)
            self._advance_answers(index, after)
            self._full = after
            advance()
        about = {"rank": self._options.fit_rank, "tokens": sum(batch.tokens for batch in self._batches)}
        taps = self._options.fit_taps if self._sets else 0
        return Fit(len(self._layers), self._width, self._bridges, self._maps, taps, about)

    def _full_depth(self, index: int, keys_too: bool) -> tuple[list[Tensor], list[Tensor]]:
        """States of full depth behind a layer, and where wanted its keys and values (rows, columns, both)."""
        after, keys = [], []
        for number, states in enumerate(self._full):
            with contextlib.ExitStack() as stack:
                seen = stack.enter_context(_keys_and_values(self._layers[index])) if keys_too else {}
                after.append(self._layer(index, number, states))
            if keys_too:
                keys.append(torch.cat((seen["k_proj"], seen["v_proj"]), -1))
        return after, keys

    def _prompt_map(self, layers: tuple[int, ...], keys: list[Tensor]) -> PromptMap:
        taps, width = self._options.fit_taps, keys[0].shape[-1]
        sums, first = _Sums(self._width * (taps + 1), width), []
        for number, (batch, states) in enumerate(zip(self._batches, self._prompts[layers], strict=True)):
            text = batch.attention_mask.bool()
            begins = text & (batch.attention_mask.cumsum(1) == 1)
            # Answers' tokens serve as well: full depth has run the prompt's layers on all tokens alike.
            chosen = text & ~begins
            inputs, _ = with_taps(normed(states) * text.unsqueeze(-1), None, taps)
            targets = keys[number][chosen]
            sums.add(inputs[chosen], targets, targets, _is_held_out(number))
            first.append(keys[number][begins])
        weight, bias = sums.solve()
        return PromptMap(weight.float(), bias.float(), torch.cat(first).float().mean(0))

    def _advance_prompts(self, index: int, after: list[Tensor]) -> None:
        for layers, every in self._prompts.items():
            if index not in layers:
                continue
            for number, states in enumerate(every):
                same = states is self._full[number]  # no layer was left out so far
                every[number] = after[number] if same else self._layer(index, number, states)

    def _advance_answers(self, index: int, after: list[Tensor]) -> None:
        out = [depth for depth in self._depths if index in depth]
        if out:
            self._bridges[index] = self._bridge(out, after)
        for depth, every in self._answers.items():
            for number, states in enumerate(every):
                if states is self._full[number] and depth not in out:
                    every[number] = after[number]
                    continue
                moved = self._bridges[index](states) if depth in out else self._layer(index, number, states)
                crosses = self._crossing(self._batches[number]).unsqueeze(-1)
                every[number] = torch.where(crosses, moved, after[number])

    def _bridge(self, out: list[frozenset[int]], after: list[Tensor]) -> Bridge:
        sums, rank = _Sums(self._width, self._width), self._options.fit_rank
        for number, batch in enumerate(self._batches):
            chosen = batch.attention_mask.bool() & self._crossing(batch)
            goal = after[number][chosen]
            for depth in out:
                states = self._answers[depth][number][chosen]
                sums.add(normed(states), goal.double() - states.double(), goal, _is_held_out(number))
        weight, bias = sums.solve()
        if rank == 0:
            mean = (sums.cross.sum(0)[-1] / sums.gram.sum(0)[-1, -1]).float()
            return Bridge(mean.new_zeros(0, self._width), mean.new_zeros(self._width, 0), mean)
        # The directions of the output that carry most of what the map adds.
        _, vectors = torch.linalg.eigh(weight @ sums.second_moments() @ weight.T)
        up = vectors[:, -min(rank, self._width) :]
        return Bridge((up.T @ weight).float(), up.float(), bias.float())

    def _crossing(self, batch: Batch) -> Tensor:
        """The columns whose tokens take bridges, (rows, columns) of bool."""
        return _columns(batch) >= (0 if self._whole else batch.prompt_length)

    def _layer(self, index: int, number: int, states: Tensor) -> Tensor:
        out = self._layers[index](states, **self._calls[number].arguments[index])
        return out[0] if self._tuples else out  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Calls:
    """What a model's forward calls its layers with for one batch."""

    embedded: Tensor
    arguments: list[dict[str, Any]]


def _layer_calls(model: Any, layers: list[Any], tuples: bool, batch: Batch) -> _Calls:
    """The arguments of each layer and the states before the first one; no layer runs."""
    seen: list[tuple[Tensor, dict[str, Any]]] = []

    def record(hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        if args:
            raise FitError(f"{type(model).__name__} calls its layers without names of arguments: it cannot be fitted")
        seen.append((hidden_states, named | {"use_cache": False}))
        return (hidden_states,) if tuples else hidden_states

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(calling(layer, record))
        call = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "use_cache": False}
        model.base_model(**call, position_ids=batch.position_ids)
    return _Calls(seen[0][0], [named for _, named in seen])


@contextlib.contextmanager
def _keys_and_values(layer: nn.Module) -> Iterator[Mapping[str, Tensor]]:
    """Within it a call of the layer leaves what its key and value projections gave, under their names."""
    seen: dict[str, Tensor] = {}
    handles = []
    for name in ("k_proj", "v_proj"):
        module = projection(layer, name)
        if module is None:
            raise FitError(
                f"{type(layer).__name__} makes queries, keys and values in one product, so prompts' keys and values "
                "cannot be fitted: take prompts at full depth or max_exit"
            )
        handles.append(module.register_forward_hook(lambda _, args, out, name=name: seen.__setitem__(name, out)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _depths(schedules: Sequence[Schedule]) -> list[frozenset[int]]:
    """The sets of skipped layers at which bridges are fitted: a few depths spread over those that schedules have."""
    found = {frozenset(range(s.num_layers)) - set(s.layers(i)) for s in schedules for i in range(s.seq_len)}
    every = sorted((gone for gone in found if gone), key=len)
    if len(every) <= _DEPTHS:
        return every
    return [every[round(i * (len(every) - 1) / (_DEPTHS - 1))] for i in range(_DEPTHS)]


def _columns(batch: Batch) -> Tensor:
    return torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device).expand(batch.input_ids.shape)


def _is_held_out(number: int) -> bool:
    return number % _HELD_OUT == _HELD_OUT - 1
