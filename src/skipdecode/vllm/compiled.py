"""Compiled decoder layers for steps that skip: one compiled *piece* serves all layers that are alike.

vLLM traces a whole model once, so its graph runs every layer. A piece is one layer's forward, compiled ahead of time by
the same backend, with the layer and its weights as inputs and any number of rows: which layers call it is decided
outside. Guards are dropped, as vLLM drops those of its own graph. What they say of the layer is kept as *facts*, and
another layer shares the piece only if all of them hold for it; so nothing is compiled once each layer has been called.
Layers that follow each other in a step without a change of rows go in *blocks*, pieces of several layers made likewise,
which saves calls; blocks are made at start only, and layers that no block serves run one by one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from skipdecode.models.release import Arguments, Forward

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BLOCK = 4
"""Layers of a block."""
STATES = ("hidden_states", "residual")  # what a layer is given and gives back; not every family has the second

_MOST = 4
"""Pieces of one function; layers of more kinds than these run eagerly."""

# Kinds of Dynamo's guards whose values say what a trace has relied on.
_KINDS = {
    *("EQUALS_MATCH", "CONSTANT_MATCH", "TYPE_MATCH", "TENSOR_MATCH"),
    *("NONE_MATCH", "BOOL_MATCH", "CLOSURE_MATCH", "SEQUENCE_LENGTH"),
}
_SCOPE = ("layer", "arguments")

_log = logging.getLogger("vllm.skipdecode")  # Below vLLM's own logger, whose handler and level it takes.

Layers = nn.Module | tuple[nn.Module, ...]
States = list[Any]
"""Hidden states, and the residual where the family has one; it is None before the first layer."""
Piece = Callable[[Any, Arguments], Any]  # of a layer, or several
Fact = tuple[str, str, Any]
"""A guard: an expression over `layer` and `arguments`, its kind, and what it gave."""


class LayerPieces:
    """The pieces of one model.

    `vllm_config`: names the backend and its options. Where vLLM compiles its own graph, once, layers are compiled too.
    `axis`: axis of a layer's inputs that counts rows.

    Attributes `eager`: whether layers for which there is no piece yet run eagerly. `makes_blocks`: whether a block for
    which there is no piece yet is compiled.
    """

    def __init__(self, vllm_config: VllmConfig | None, axis: int) -> None:
        self._config: VllmConfig = vllm_config  # None if nothing is compiled
        self._axis = axis
        self._of: dict[tuple[Layers, Piece, tuple[str, ...]], Piece | None] = {}
        self._compiled: dict[tuple[Piece, tuple[str, ...]], list[tuple[Piece, list[Fact]]]] = {}
        self.makes_blocks = False
        settings = vllm_config and vllm_config.compilation_config
        self.eager = not settings or int(settings.mode or 0) < 2 or settings.backend == "eager"

    @property
    def count(self) -> int:
        """Pieces made so far."""
        return sum(map(len, self._compiled.values()))

    def __call__(self, function: Forward, layer: nn.Module, arguments: Arguments) -> Any:
        """Call `function(layer, **arguments)`; the first call for a layer may compile."""
        piece = self._piece(_alone(function), layer, arguments, compiles=not self.eager)
        return function(layer, **arguments) if piece is None else piece(layer, arguments)

    def block(self, forward: Forward, layers: tuple[nn.Module, ...], arguments: Arguments) -> Any:
        """Run layers of one class one after the other; None, and nothing done, where no piece serves them."""
        piece = self._piece(_in_turn(forward), layers, arguments, compiles=self.makes_blocks and not self.eager)
        return None if piece is None else piece(layers, arguments)

    def _piece(self, function: Piece, layer: Layers, arguments: Arguments, *, compiles: bool) -> Piece | None:
        """The piece that serves a layer, or a block; None if there is none."""
        nones = tuple([name for name, value in arguments.items() if value is None])
        key = layer, function, nones
        piece = self._of.get(key)
        if piece is not None or (key in self._of and not compiles):
            return piece
        rows = arguments.get("hidden_states", next(iter(arguments.values()))).shape[self._axis]
        if rows < 2:
            return None  # A trace would take the one row for a constant; the next call may have more.
        compiled = self._compiled.setdefault((function, nones), [])
        scope = dict(zip(_SCOPE, (layer, arguments), strict=True))
        piece = next((run for run, facts in compiled if _all_hold(facts, scope)), None)
        if piece is None and compiles:
            try:
                if len(compiled) == _MOST:
                    raise RuntimeError(f"they differ from the {_MOST} that are compiled")
                compiled.append(self._compile(function, layer, arguments, rows))
                piece = compiled[-1][0]
            except Exception as e:  # Dynamo's internals differ by version, and none of it must stop the engine.
                self._run_eagerly(layer, f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}")
        if compiled or self.eager:
            self._of[key] = piece
        return piece

    def _run_eagerly(self, layer: Layers, reason: str) -> None:
        if isinstance(layer, tuple):  # Single layers do for a block.
            _log.info("skipdecode: no blocks of layers: %s", reason)
            return
        _log.warning("skipdecode: decoder layers run eagerly in steps that skip, which is slower: %s", reason)
        self.eager = True

    def _compile(self, forward: Piece, layer: Layers, arguments: Arguments, rows: int) -> tuple[Piece, list[Fact]]:
        settings = self._config.compilation_config
        backend = settings.init_backend(self._config, prefix=f"skipdecode_{self.count}")
        options = dict(settings.inductor_compile_config) if backend == "inductor" else {}
        facts: list[Fact] = []

        def record(entries: Sequence[Any]) -> list[bool]:
            # Of the arguments not the tensors: in other steps they have other rows.
            known = [e for e in entries if e.has_value and e.guard_type in _KINDS and e.name.startswith(_SCOPE)]
            lasting = [e for e in known if e.name.startswith("layer") or not isinstance(e.value, Tensor)]
            facts.extend((e.name, e.guard_type, _described(e.guard_type, e.value)) for e in lasting)
            return [False] * len(entries)

        self._mark(arguments, rows)
        options["guard_filter_fn"] = record
        compiled: Any = torch.compile(forward, fullgraph=True, dynamic=False, backend=backend, options=options)
        with torch._inductor.config.patch(freezing=False):  # Frozen weights would be this layer's, for all layers.
            ahead = compiled.aot_compile(((layer, arguments), {}))
        if not facts:
            raise RuntimeError("this torch does not say what a trace relied on")
        return ahead.fn, facts

    def _mark(self, value: object, rows: int) -> None:
        """Tell Dynamo which axis may have another length next time."""
        if isinstance(value, Tensor) and value.dim() > self._axis and value.shape[self._axis] == rows:
            torch._dynamo.mark_dynamic(value, self._axis)
        elif isinstance(value, (tuple, list, dict)):
            for part in value.values() if isinstance(value, dict) else value:
                self._mark(part, rows)


@functools.cache
def _alone(function: Forward) -> Piece:
    """Make a piece of one layer."""

    def run(layer: Layers, arguments: Arguments) -> Any:
        return function(layer, **arguments)

    return run


@functools.cache
def _in_turn(forward: Forward) -> Piece:
    """Make a piece of several layers, each on the output of the layer before."""

    def run(layer: Any, arguments: Arguments) -> Any:  # Named as in `_SCOPE`: here it is several.
        names = [name for name in STATES if name in arguments]
        states: States = []
        for part in layer:
            states = listed(forward(part, **arguments))
            arguments = arguments | dict(zip(names, states, strict=True))
        return tuple(states)

    return run


def listed(output: object) -> States:
    """The states that a layer gave, one or several."""
    return list(output) if isinstance(output, tuple) else [output]


def _described(kind: str, value: Any) -> object:
    """A value as far as a guard of this kind looks at it."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.stride(), value.device
    if kind == "CLOSURE_MATCH":
        return getattr(value, "__code__", value)
    seen: dict[str, Callable[[Any], object]] = {"TYPE_MATCH": type, "SEQUENCE_LENGTH": len}
    return seen[kind](value) if kind in seen else value


def _all_hold(facts: list[Fact], scope: Arguments) -> bool:
    try:
        return all(_described(kind, eval(name, {}, scope)) == value for name, kind, value in facts)
    except (AttributeError, LookupError, TypeError, NameError):
        return False
