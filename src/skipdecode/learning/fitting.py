"""Fits a model's bridges and prompt maps by least squares, in one sweep from the bottom layer to the top.

Full depth's states and those of the skipping model advance together, a layer at a time. A bridge takes the skipping
model's state to full depth's next state, so later bridges correct what earlier ones missed; one bridge serves every
depth at which its layer is out. A prompt map takes the state that passes by to full depth's keys and values. All sums
are of one pass, and solved in fp64 with a ridge that held-out batches choose. docs/theory.md has the derivation.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from skipdecode.common.progress import progress_bar
from skipdecode.common.spread import spread_over
from skipdecode.data.batches import Batch
from skipdecode.errors import DivergedError, FitError
from skipdecode.learning.settings import FitOptions
from skipdecode.models.attach import at_full_depth
from skipdecode.models.cache import SkipCache
from skipdecode.models.families import decoder_layers, find_family, projection, unwrap
from skipdecode.models.fit import Fit
from skipdecode.models.fit_maps import Bridge, PromptMap, normed, prompt_features
from skipdecode.models.gate import GateState, calling, gate_layer, gate_of, ungate_layer
from skipdecode.models.plan import LayerPlan, StepPlan
from skipdecode.schedule import Schedule

_RIDGES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""Of the mean diagonal of the states' products."""
_USUAL_RIDGE = 3e-2  # where none is chosen: the best or nearly, of 1,200 to 16,000 tokens
_TESTED_EVERY = 5
"""Every so many batches one is held out, to choose the ridge."""
TOKENS_A_COLUMN = 4
"""Tokens of a bridge for each column of the states: where responses have fewer, the ends of prompts serve as well."""
_LEAST_TOKENS = 4
"""A map of keys and values needs its inputs over this number of tokens; the ridge makes up for the rest."""
_NOTHING: frozenset[int] = frozenset()
_SHOWN = 3


def make_fit(
    model: nn.Module,
    batches: Sequence[Batch],
    options: FitOptions,
    schedules: Sequence[Schedule],
    until: float = math.inf,
) -> Fit:
    """Fit schedules of one drop order: maps for their prompt sets, bridges over the layers that they skip.

    Memory grows with the tokens of `batches` x hidden_size x (depths + 1), the states before and behind one layer.

    `model`: fitted at full depth, whatever is attached. `batches`: texts at full depth: prompts and answers, aligned.
    `until`: reading of `time.perf_counter()` by which the fit is made, on fewer texts if it must be.

    Raises FitError: fewer tokens than a map has inputs, or a family that makes keys and values together with queries;
    DivergedError: a state is not finite.
    """
    with torch.inference_mode(), at_full_depth(model):
        return _Sweep(model, batches, options, schedules, until).run()


class _Inputs:
    """Gram matrices of a map's inputs (tokens, features) with an intercept: [0] of training, [1] of held-out tokens.

    A batch's products are fp32 on the model's device, their sums fp64 on the CPU: not every device has fp64. All maps
    of one set of inputs share the sums. `in_haste`: the ridge is not chosen, which takes most of a small fit's time.
    """

    def __init__(self, features: int, *, in_haste: bool = False) -> None:
        self.tokens, self._in_haste = 0, in_haste
        self.gram = torch.zeros(2, features + 1, features + 1, dtype=torch.float64)

    def add(self, inputs: Tensor, held_out: bool, times: int = 1) -> None:
        """Take in the inputs of a batch (tokens, features + 1), each as if it came so many times."""
        self.gram[int(held_out)] += _products(inputs, inputs).mul_(times)
        self.tokens += times * len(inputs)

    def solve(self, cross: Tensor, least: int) -> tuple[Tensor, Tensor]:
        """Weights (outputs, features) and bias (outputs,) with the ridge that held-out tokens favour.

        `cross` (2, features + 1, outputs) are the products of inputs and targets; `least` is the fewest tokens.
        """
        if self.tokens < least:
            raise FitError(f"{self.tokens} tokens are too few to fit a map: {least} are needed; give more records")
        gram, products = self.gram.sum(0), cross.sum(0)
        inputs, outputs = self._center(gram, products)
        moments, products = _about(gram, products, (inputs, outputs))
        ridge = self._ridge(cross) * float(moments.diagonal().mean())
        ridged = moments + ridge * torch.eye(len(moments), dtype=moments.dtype)
        weight = torch.cholesky_solve(products, torch.linalg.cholesky(ridged))
        return weight.T, outputs - inputs @ weight

    def _ridge(self, cross: Tensor) -> float:
        """The ridge whose solution on the tokens to learn from does best on the others."""
        if self._in_haste or not self.gram[1].any():
            return _USUAL_RIDGE
        center = self._center(self.gram[0], cross[0])
        values, vectors, moments = self._basis
        learned = vectors.T @ _about(self.gram[0], cross[0], center)[1]
        _, products = _about(self.gram[1], cross[1], center)
        # With D = 1 / (values + ridge) the solution is vectors @ D * learned, and its loss a quadratic form of D.
        square = (learned @ learned.T) * moments
        linear = (learned * (vectors.T @ products)).sum(1)

        def loss(ridge: float) -> float:
            d = 1 / (values.clamp(min=0) + ridge * values.mean())
            return float(d @ square @ d - 2 * linear @ d)

        return min(_RIDGES, key=loss)

    @cached_property
    def _basis(self) -> tuple[Tensor, Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the inputs to learn from about their mean; of these, the others' moments."""
        center = self._center(self.gram[0], self.gram[0][:, :-1])
        first, others = (_about(gram, gram[:, :-1], center)[0] for gram in self.gram)
        values, vectors = torch.linalg.eigh(first)
        return values, vectors, vectors.T @ others @ vectors

    @staticmethod
    def _center(gram: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
        """Means of inputs and targets."""
        return gram[-1, :-1] / gram[-1, -1], cross[-1] / gram[-1, -1]


def _products(inputs: Tensor, targets: Tensor) -> Tensor:
    """Sums over tokens of the products of inputs and targets, (features, outputs)."""
    return (inputs.T @ targets).cpu().double()


def _about(gram: Tensor, cross: Tensor, center: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Products of inputs, and of inputs and targets, about a center of both."""
    inputs, outputs = center
    count, first, second = gram[-1, -1], gram[-1, :-1], cross[-1]
    moments = gram[:-1, :-1] - first.outer(inputs) - inputs.outer(first) + count * inputs.outer(inputs)
    products = cross[:-1] - first.outer(outputs) - inputs.outer(second) + count * inputs.outer(outputs)
    return moments, products


class _Sweep:
    """Every batch's states before the layer at work: of full depth, of prompts and of the depths.

    Depths that have left out the same layers so far share their states, which are those of full depth at first.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        options: FitOptions,
        schedules: Sequence[Schedule],
        until: float,
    ) -> None:
        self._until, self._in_haste = until, False
        self._plain = unwrap(model)
        self._layers: list[nn.Module] = list(decoder_layers(self._plain))
        self._tuples = find_family(self._plain).returns
        self._width = int(self._plain.config.get_text_config(decoder=True).hidden_size)
        self._options, self._batches = options, [batch.to(self._plain.device) for batch in batches]
        self._calls = [_layer_calls(self._plain, self._layers, self._tuples, batch) for batch in self._batches]
        self._depths = _depths(schedules, options.fit_depths)
        # Under "max_exit" prompt tokens skip what position 0 skips, and take its bridges like answers.
        self._whole = all(schedule.prompt == "max_exit" for schedule in schedules)
        rows = sum(len(batch.ids) for batch in batches)
        answers = sum(batch.response_tokens for batch in batches)
        self._prompt_ends = max(0, TOKENS_A_COLUMN * self._width - answers) // rows
        self._projected: dict[tuple[int, ...], set[int]] = {}  # layers that want maps, by the layers that prompts run
        for schedule in schedules:
            if schedule.projected:
                self._projected.setdefault(schedule.prompt_layers(), set()).update(schedule.projected)
        embedded = [calls[0][0] for calls in self._calls]
        self._states = {_NOTHING: embedded}
        self._prompts = {layers: list(embedded) for layers in self._projected}
        self._inputs: dict[tuple[int, ...], _Inputs] = {}
        self._bridges: dict[int, Bridge] = {}
        self._maps: dict[tuple[int, ...], dict[int, PromptMap]] = {layers: {} for layers in self._projected}

    def run(self) -> Fit:
        last = max({layer for depth in self._depths for layer in depth}.union(*self._projected.values()))
        with progress_bar(last + 1, "layer", name="fitting") as bar:
            for index in range(last + 1):
                start = time.perf_counter()
                wanted = [layers for layers, projected in self._projected.items() if index in projected]
                after, keys = self._full_depth(index, bool(wanted))
                for layers in wanted:
                    self._maps[layers][index] = self._prompt_map(layers, keys)
                self._advance_prompts(index, after)
                self._advance_answers(index, after)
                self._keep_pace((last - index) * (time.perf_counter() - start))
                bar.update()
        about = {"rank": self._options.fit_rank, "tokens": sum(batch.tokens for batch in self._batches)}
        taps = self._options.fit_taps if self._maps else 0
        return Fit(len(self._layers), self._width, self._bridges, self._maps, taps, about)

    def _keep_pace(self, seconds: float) -> None:
        """Leave texts out, and make haste, if the layers to come would take so many `seconds`, and there are fewer."""
        left, count = max(0.0, self._until - time.perf_counter()), len(self._batches)
        if seconds <= left:
            return
        self._in_haste = True
        bridged = sum(int(batch.attention_mask[:, self._crossing(batch) :].sum()) for batch in self._batches)
        # As many tokens as a bridge has columns.
        least = math.ceil(count * (self._width + 1) / bridged)
        chosen = spread_over(count, min(count, max(least, round(count * left / seconds), 1)))
        self._inputs.clear()  # which are sums over all texts
        lists: list[list[Any]] = [self._batches, self._calls, *self._states.values(), *self._prompts.values()]
        for every in lists:
            every[:] = [every[number] for number in chosen]

    def _full_depth(self, index: int, keys_too: bool) -> tuple[list[Tensor], list[Tensor]]:
        """States of full depth behind a layer, and where wanted its keys and values (rows, columns, both)."""
        after, keys = [], []
        for number, states in enumerate(self._states[_NOTHING]):
            with contextlib.ExitStack() as stack:
                seen = stack.enter_context(_keys_and_values(self._layers[index])) if keys_too else {}
                after.append(self._layer(index, number, states))
            if keys_too:
                keys.append(torch.cat((seen["k_proj"], seen["v_proj"]), -1))
        return after, keys

    def _prompt_map(self, layers: tuple[int, ...], keys: list[Tensor]) -> PromptMap:
        taps, width = self._options.fit_taps, keys[0].shape[-1]
        features = self._width * (taps + 1)
        known = self._inputs.get(layers)  # until the prompt goes on, its maps share their inputs
        inputs = self._inputs[layers] = known or _Inputs(features, in_haste=self._in_haste)
        cross, first = torch.zeros(2, features + 1, width, dtype=torch.float64), []
        for number, (batch, states) in enumerate(zip(self._batches, self._prompts[layers], strict=True)):
            text = batch.attention_mask.bool()
            begins = text & (batch.attention_mask.cumsum(1) == 1)
            # Answers' tokens serve as well: full depth has run the prompt's layers on all tokens alike.
            chosen, held_out = text & ~begins, _is_held_out(number)
            seen, _ = prompt_features(states, text, None, taps)
            x = functional.pad(seen[chosen], (0, 1), value=1.0)
            if known is None:
                inputs.add(x, held_out)
            cross[int(held_out)] += _products(x, keys[number][chosen].float())
            first.append(keys[number][begins].cpu())
        weight, bias = inputs.solve(cross, least=features // _LEAST_TOKENS)
        return PromptMap(weight.float(), bias.float(), torch.cat(first).float().mean(0))

    def _advance_prompts(self, index: int, after: list[Tensor]) -> None:
        for layers, every in self._prompts.items():
            if index not in layers:
                continue
            self._inputs.pop(layers, None)
            for number, states in enumerate(every):
                same = states is self._states[_NOTHING][number]  # no layer was left out so far
                every[number] = after[number] if same else self._layer(index, number, states)

    def _advance_answers(self, index: int, after: list[Tensor]) -> None:
        out = Counter(_below(depth, index) for depth in self._depths if index in depth)
        if out:
            self._bridges[index] = self._bridge(out, after).to(self._plain.device)
        moved = {_NOTHING: after}
        for depth in self._depths:
            # Above its last bridge nobody asks for a depth's states.
            if (gone := _below(depth, index + 1)) not in moved and max(depth) > index:
                moved[gone] = self._answers(index, self._states[_below(depth, index)], after, index in depth)
        self._states = moved

    def _answers(self, index: int, every: list[Tensor], after: list[Tensor], out: bool) -> list[Tensor]:
        """Full depth's states of prompts, and those of answers behind a layer or its bridge."""
        moved = []
        for number, states in enumerate(every):
            start = self._crossing(self._batches[number])
            if out:
                answers = self._bridges[index](states[:, start:])
            else:
                answers = self._layer(index, number, states, start)[:, start:]
            moved.append(torch.cat((after[number][:, :start], answers), 1))
        return moved

    def _bridge(self, out: Mapping[frozenset[int], int], after: list[Tensor]) -> Bridge:
        """The bridge of a layer, from states without some layers (and of how many depths they are) to full depth's."""
        inputs, rank = _Inputs(self._width, in_haste=self._in_haste), self._options.fit_rank
        cross = torch.zeros(2, self._width + 1, self._width, dtype=torch.float64)
        for number, batch in enumerate(self._batches):
            start, held_out = self._crossing(batch), _is_held_out(number)
            chosen = batch.attention_mask[:, start:].bool()
            goal = after[number][:, start:][chosen].float()
            weight = torch.rsqrt(goal.square().mean(-1, keepdim=True) + 1e-12)
            for gone, times in out.items():
                states = self._states[gone][number][:, start:][chosen].float()
                x = torch.cat((normed(states) * weight, weight), 1)
                inputs.add(x, held_out, times)
                cross[int(held_out)] += _products(x, (goal - states) * weight).mul_(times)
        if rank == 0:
            mean = (cross.sum(0)[-1] / inputs.gram.sum(0)[-1, -1]).float()
            return Bridge(mean.new_zeros(0, self._width), mean.new_zeros(self._width, 0), mean)
        matrix, bias = inputs.solve(cross, least=min(rank, self._width) + 1)
        # The directions of the output that carry most of what the map adds.
        _, vectors = torch.linalg.eigh(matrix @ inputs.gram.sum(0)[:-1, :-1] @ matrix.T)
        up = vectors[:, -min(rank, self._width) :]
        return Bridge((up.T @ matrix).float(), up.float(), bias.float())

    def _crossing(self, batch: Batch) -> int:
        """The first column whose tokens take bridges."""
        return 0 if self._whole else max(0, batch.prompt_length - self._prompt_ends)

    def _layer(self, index: int, number: int, states: Tensor, start: int = 0) -> Tensor:
        """A layer's output; columns before `start` only leave their keys and values there, and pass by."""
        _, args, named = self._calls[number][index]
        with self._gated(index, LayerPlan(states.shape[1], start)) if start else contextlib.nullcontext():
            out = self._layers[index](states, *args, **named)
        after: Tensor = out[0] if self._tuples else out
        batch = self._batches[number]
        check_finite(after[batch.attention_mask.bool()], batch.ids)
        return after

    @contextlib.contextmanager
    def _gated(self, index: int, plan: LayerPlan) -> Iterator[None]:
        whole = find_family(self._plain).recurrent
        state = GateState(self._tuples, lambda: SkipCache(self._plain.config), whole=whole)
        state.plan = StepPlan(plan.count, (plan,) * len(self._layers))
        layer = self._layers[index]
        attached = gate_of(layer)
        if attached is not None:
            ungate_layer(layer)
        gate_layer(layer, index, state)
        try:
            yield
        finally:
            ungate_layer(layer)
            if attached is not None:
                gate_layer(layer, index, attached)


_Call = tuple[Tensor, tuple[Any, ...], dict[str, Any]]


def _layer_calls(model: Any, layers: list[nn.Module], tuples: int, batch: Batch) -> list[_Call]:
    """The arguments with which a model's forward calls each layer, all with the states before the first: none runs."""
    seen: list[_Call] = []

    def record(hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        seen.append((hidden_states, args, named | {"use_cache": False}))
        return (hidden_states, *[None] * (tuples - 1)) if tuples else hidden_states

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(calling(layer, record))
        call = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "use_cache": False}
        model.base_model(**call, position_ids=batch.position_ids)
    return seen


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


def _depths(schedules: Sequence[Schedule], most: int) -> list[frozenset[int]]:
    """The sets of skipped layers at which bridges are fitted: a few depths spread over those that schedules have."""
    skipped = {frozenset(range(s.num_layers)) - set(s.layers(i)) for s in schedules for i in range(s.seq_len)}
    every = sorted((gone for gone in skipped if gone), key=len)
    if len(every) <= most:
        return every
    return [every[round(i * (len(every) - 1) / max(1, most - 1))] for i in range(most)]


def _below(depth: frozenset[int], index: int) -> frozenset[int]:
    return frozenset(layer for layer in depth if layer < index)


def _is_held_out(number: int) -> bool:
    return number % _TESTED_EVERY == _TESTED_EVERY - 1


def check_finite(values: Tensor, records: Sequence[str]) -> None:
    """Raise DivergedError if a state or a loss of these records is not finite."""
    if not values.isfinite().all():
        shown = ", ".join(records[:_SHOWN]) + (", …" if len(records) > _SHOWN else "")
        raise DivergedError(f"the model's arithmetic overflows on records {shown}: check the model's weights")
