"""Gates around a vLLM model's decoder layers: they cut a layer's input to the rows that run it, and put rows together.

A layer object takes a subclass of its own class whose `forward` asks the gates; the model's loop over the layers stays
as it is. Between two layers that run the same rows nothing is copied: the loop then hands on these rows alone, while
the others wait here. The last layer of this process gives all rows back.

vLLM's layers pass on hidden states and a *residual* whose sum is the text's state; the next norm adds them. A row that
sits a layer out keeps both.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import ModuleList

from skipdecode.errors import ScheduleError, UnsupportedModelError
from skipdecode.models.gate import with_mixin
from skipdecode.models.release import Arguments
from skipdecode.schedule import Schedule
from skipdecode.vllm.compiled import BLOCK, STATES, LayerPieces, States, listed
from skipdecode.vllm.projection import ContextMemory, ContextRows, KeyProjection, LayerBridge
from skipdecode.vllm.step_rows import ALL, NONE, Selection, StepRows

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Each is tested against the transformers path (tests/vllm/plugin/test_oracle.py). False: schedules that project
# prompts are refused, for keys and values are not one product of the normed state, rotated alike in every layer, or
# layers have recurrent states.
_NAMES = {
    True: "Ernie4_5 Gemma Gemma2 Gemma3 Glm4 GptOss Granite GraniteMoe Llama Ministral3 Mistral Mixtral OPT Olmoe Phi3 "
    "Qwen2 Qwen2Moe Qwen3 Qwen3Moe",
    False: "Arcee Exaone4 FalconH1 GraniteMoeHybrid Olmo2 Olmo3 SeedOss SmolLM3",
}
PROJECTS = {f"{name}ForCausalLM": projects for projects, names in _NAMES.items() for name in names.split()}
"""By vLLM's architecture: whether a layer can store keys and values without running."""

_WRONG = {  # at full depth, without this plugin
    "Cohere2ForCausalLM": ", whose windows are longer than those of transformers by a token",
    "Ernie4_5_MoeForCausalLM": ", which on CPUs leaves out the bias by which experts are chosen",
    "Lfm2ForCausalLM": ", which on CPUs gives other tokens than transformers at full depth",
    "PhiMoEForCausalLM": ", which leaves out the bias of its head",
}
_LAST = ("norm", "final_layernorm", "final_layer_norm", "ln_f")  # how decoders name the norm after the last layer
Rows = slice | Tensor
Layers = dict[int, nn.Module]  # by number
_NORM = -1  # in the place of a layer's number


def check_architecture(architecture: str) -> None:
    """Raise UnsupportedModelError unless an architecture is in the table; the message lists the table."""
    if architecture not in PROJECTS:
        raise UnsupportedModelError(
            f"skipdecode has not been tested with vLLM's {architecture}{_WRONG.get(architecture, '')}: supported are "
            f"{', '.join(PROJECTS)}"
        )


def check_projects(schedules: Iterable[Schedule], architecture: str, quantization: object = None) -> None:
    """Raise ScheduleError if a schedule projects what this architecture, or these weights, cannot."""
    works = [name for name, projects in PROJECTS.items() if projects]
    refusal = None
    if architecture not in works:
        refusal = f"vLLM's {architecture} cannot do here (those that can: {', '.join(works)})"
    elif quantization is not None:
        refusal = f"weights quantised by {quantization} cannot do here"
    for schedule in schedules:
        if schedule.projected and refusal:
            raise ScheduleError(
                f"schedule {schedule.name!r} projects a prompt's keys and values in layers "
                f"{', '.join(map(str, schedule.projected))}, which {refusal}: set prompt='full'"
            )


def find_layers(model: nn.Module, architecture: str, count: int) -> tuple[Layers, int, nn.Module | None]:
    """The decoder layers that this process holds, by number; the axis that counts rows; and the norm after the last.

    Raises UnsupportedModelError if the model has no list of `count` decoder layers.
    """
    check_architecture(architecture)
    lists = (name for name, part in model.named_modules() if isinstance(part, ModuleList) and len(part) == count)
    where, _, name = next(lists, "").rpartition(".")  # the outermost
    if not name:
        raise UnsupportedModelError(
            f"vLLM's {type(model).__name__} has no list of {count} decoder layers: this version of vLLM, or a config "
            "that counts other layers, is not supported"
        )
    decoder = model.get_submodule(where)
    # With pipeline parallelism the layers of other stages are there as placeholders without weights.
    held = {i: layer for i, layer in enumerate(getattr(decoder, name)) if next(layer.parameters(), None) is not None}
    through_transformers = type(model).__module__.startswith("vllm.model_executor.models.transformers")
    norms = (getattr(decoder, name, None) for name in _LAST)
    return held, 1 if through_transformers else 0, next((norm for norm in norms if norm is not None), None)


class LayerGates:
    """The gates of one model.

    `layers`: the decoder layers of this process by their numbers in the model. `axis`: axis of a layer's inputs that
    counts rows: 0, or 1 for models that run through transformers' own code. `vllm_config`: says how layers are
    compiled; None: not at all. `norm`: compiled with them: it follows the last layer.

    Attributes: `pieces`: runs layers in a step that skips. `projections`: for the layers that some schedule projects.
    `bridges`: for the layers that have one. `memory`: for a fit whose maps of prompts take taps. `forward`: the step
    under way; None lets every layer run on everything. `finished`: whether the last layer's gate was passed since the
    step began.
    """

    def __init__(
        self, layers: Layers, axis: int = 0, vllm_config: VllmConfig | None = None, norm: nn.Module | None = None
    ) -> None:
        self.layers, self.axis = layers, axis
        self.pieces = LayerPieces(vllm_config, axis)
        self.projections: dict[int, KeyProjection] = {}
        self.bridges: dict[int, LayerBridge] = {}
        self.memory: ContextMemory | None = None
        self.forward: _Forward | None = None
        self.finished = False
        # Where vLLM compiles, its norms are many small operations for whoever calls them one by one.
        gated = dict(layers)
        if norm is not None and not (axis or self.pieces.eager) and next(norm.parameters(), None) is not None:
            gated[_NORM] = norm
        for index, layer in gated.items():
            names = _names(layer)
            if index != _NORM and "hidden_states" not in names:
                raise UnsupportedModelError(
                    f"decoder layers of class {type(layer).__name__} take no hidden_states: this version of vLLM "
                    "builds the model in a way that the plugin does not know"
                )
            layer.__dict__["_skipdecode"] = (index, self, names)
            base: Any = type(layer)  # for mypy, not hashable
            layer.__class__ = with_mixin(_Gated, base)

    def begin(
        self, step: StepRows, device: torch.device, slots: dict[int, Tensor], context: ContextRows | None = None
    ) -> None:
        """Start a step; `end` must follow.

        `slots`: where the rows that a layer projects are stored, by layer. `context`: where the states before each
        row are; see `ContextMemory.begin`.
        """
        self.finished = False
        self.forward = _Forward(self, step, device, slots)
        if self.memory is not None:
            self.memory.begin(context, device)

    def end(self) -> None:
        """The step is over, by an exception too."""
        self.forward = None
        if self.memory is not None:
            self.memory.end()


class _Forward:
    """One step that skips layers: the rows that the loop over the layers holds, and those that wait."""

    def __init__(self, gates: LayerGates, step: StepRows, device: torch.device, slots: dict[int, Tensor]) -> None:
        self._gates, self._step, self._slots = gates, step, slots
        self._rows = {n: _selection(part.rows, device) for n, part in enumerate(step.parts)} | {ALL: slice(None)}
        texts = {"schedules": step.schedules, "starts": step.starts}
        self._texts = {name: torch.from_numpy(of).to(device) for name, of in texts.items() if of is not None}
        self._blocks = _blocks_of(step, gates.layers) if gates.axis == 0 and not gates.pieces.eager else {}
        self._done: set[int] = set()  # layers that ran as part of a block
        self._holds = ALL
        self._waiting: States = []  # states of all rows, where the loop holds some
        self._passing: tuple[int, list[Tensor]] | None = None  # states of rows that layers project, and which rows

    def run(self, index: int, layer: Any, arguments: Arguments) -> Any:
        """Run one layer, or the norm after the last."""
        if index == _NORM:
            return self._gates.pieces(type(layer)._skipdecode_base.forward, layer, arguments)
        states = [arguments[name] for name in STATES if name in arguments]
        if index not in self._done:
            states = self._layer(index, layer, arguments, states)
        if index == max(self._gates.layers):
            states, self._gates.finished = self._change_rows(states, ALL), True
        return tuple(states) if len(states) > 1 else states[0]

    def _layer(self, index: int, layer: Any, arguments: Arguments, states: States) -> States:
        step = self._step
        if step.projects[index] != NONE:
            # First, for a text's rows may attend to those that another leaves in this step.
            states = self._project(index, arguments, states)
        if step.layers[index] != NONE:
            states = self._change_rows(states, step.layers[index])
            self._bridge_rows(index, self._waiting, step.bridge(index))  # of those that sit the layer out
            return self._call(index, layer, arguments, states)
        if len(states) > 1 and states[1] is None:
            states[1] = torch.zeros_like(states[0])
        return self._across(index, states)

    def _call(self, index: int, layer: Any, arguments: Arguments, states: States) -> States:
        """The layer on the rows that `states` holds; where it begins a block, all of that."""
        forward, pieces = type(layer)._skipdecode_base.forward, self._gates.pieces
        state_arguments = dict(zip((n for n in STATES if n in arguments), states, strict=True))
        if self._holds != ALL:
            total, rows = self._step.num_rows, self._rows[self._holds]
            others = {n: self._cut(v, total, rows) for n, v in arguments.items() if n not in state_arguments}
            return listed(pieces(forward, layer, others | state_arguments))
        self._passing = None
        if block := self._blocks.get(index):
            done = pieces.block(forward, tuple([self._gates.layers[i] for i in block]), arguments | state_arguments)
            if done is not None:
                self._done.update(block)
                return listed(done)
        return listed(pieces(forward, layer, arguments | state_arguments))

    def _project(self, index: int, arguments: Arguments, states: States) -> States:
        """Store keys and values of the rows that a layer projects; returns the states of those that run it."""
        step, gates = self._step, self._gates
        states = self._change_rows(states, ALL if step.layers[index] == NONE else step.layers[index])
        kind = step.projects[index]
        rows = self._rows[kind]
        all_states = states if self._holds == ALL else self._waiting
        if self._passing is None or self._passing[0] != kind:
            self._passing = kind, [self._take(s, rows) for s in all_states]
        state_arguments: Arguments = dict(zip(STATES, self._passing[1], strict=False))
        state_arguments["positions"] = self._cut(arguments.get("positions"), step.num_rows, rows)
        projection = gates.projections[index]
        if self._texts and projection.maps is not None:
            state_arguments |= {name: of[rows] for name, of in self._texts.items()}
            if gates.memory is not None:
                state_arguments["context"] = gates.memory.context(index, partial(_summed, all_states))[rows]
        keys, values = gates.pieces(type(projection).forward, projection, state_arguments)
        if index in self._slots:
            projection.store(keys, values, self._slots[index])
        return states

    def _across(self, index: int, states: States) -> States:
        """States in which the rows that take a layer's bridge have taken it, and the others are as they were."""
        kind = self._step.bridge(index)
        if kind == NONE or index not in self._gates.bridges:
            return states
        if self._holds not in (ALL, kind):
            states = self._change_rows(states, kind)
        if kind == self._holds:
            return [self._bridged(index, states), *states[1:]]
        self._bridge_rows(index, states, kind)
        return states

    def _bridge_rows(self, index: int, states: States, kind: int) -> None:
        """Have some of the rows in states of all rows take a layer's bridge."""
        if kind != NONE and index in self._gates.bridges:
            rows = self._rows[kind]
            taken = [None if s is None else self._take(s, rows) for s in states]
            self._view(states[0])[rows] = self._view(self._bridged(index, taken))

    def _bridged(self, index: int, states: States) -> Tensor:
        """The first of the two states behind a layer's bridge, which leaves the second as it is."""
        state_arguments = dict(zip(STATES, states, strict=False))
        if "residual" in state_arguments and state_arguments["residual"] is None:  # before the first layer
            state_arguments["residual"] = torch.zeros_like(states[0])
        bridge = self._gates.bridges[index]
        bridged: Tensor = self._gates.pieces(type(bridge).forward, bridge, state_arguments)
        return bridged

    def _change_rows(self, states: States, kind: int) -> States:
        """Other rows than those at hand: first all of them, then those that are asked for."""
        if kind == self._holds:
            return states
        self._passing = None
        if self._holds != ALL:
            all_states = []
            for waiting, state in zip(self._waiting, states, strict=True):
                full = waiting
                if full is None:
                    # Before the first layer there is no residual: rows that sat it out have none to add.
                    shape = list(state.shape)
                    shape[self._gates.axis] = self._step.num_rows
                    full = state.new_zeros(shape)
                self._view(full)[self._rows[self._holds]] = self._view(state)
                all_states.append(full)
            states, self._waiting = all_states, []
        self._holds = kind
        if kind == ALL:
            return states
        self._waiting = states
        first = len(states) > 1 and states[1] is None
        rows = self._rows[kind]
        taken = [None if s is None else self._take(s, rows) for s in states]
        # The first layer makes its input the residual: it must not share memory with the rows that wait.
        return [t.clone() if first and t is not None else t for t in taken]

    def _view(self, state: Tensor) -> Tensor:
        return state if self._gates.axis == 0 else state.transpose(0, self._gates.axis)

    def _take(self, state: Tensor, rows: Rows) -> Tensor:
        return state[rows] if self._gates.axis == 0 else state[:, rows]

    def _cut(self, value: Any, total: int, rows: Rows) -> Any:
        """Positions and the like, cut to some rows."""
        if isinstance(value, tuple):
            return tuple(self._cut(v, total, rows) for v in value)
        if isinstance(value, Tensor) and value.dim() > self._gates.axis and value.shape[self._gates.axis] == total:
            return self._take(value, rows)
        return value


class _Gated:
    """Mixed into a decoder layer's class."""

    _skipdecode: tuple[int, LayerGates, tuple[str, ...]]

    def forward(self, *args: object, **kwargs: object) -> Any:
        index, gates, names = self._skipdecode
        if gates.forward is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # Traced into vLLM's own graph.
        return gates.forward.run(index, self, dict(zip(names, args, strict=False)) | kwargs)


def _blocks_of(step: StepRows, layers: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Map a first layer to the block of layers that all rows run while nothing else is done between them."""
    blocks, run = {}, []
    for index in layers:
        if step.layers[index] == ALL and step.projects[index] == NONE:
            # The first layer of all has no residual yet.
            run += [index] if index else []
            if len(run) == BLOCK:
                blocks[run[0]], run = tuple(run), []
        elif {step.layers[index], step.projects[index], step.bridge(index)} != {NONE}:
            run = []
    return blocks


def _names(layer: nn.Module) -> tuple[str, ...]:
    """Names of a layer's arguments, in order. vLLM's own operations say it in `forward_native`."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(getattr(layer, "forward_native", layer.forward)).parameters.values()
    return tuple(p.name for p in parameters if p.kind in kinds)


def _summed(states: States) -> Tensor:
    """The text's states (rows, width) of a layer's two."""
    hidden = states[0] if len(states) < 2 or states[1] is None else states[0] + states[1]
    return hidden.view(-1, hidden.shape[-1])  # type: ignore[no-any-return]


def _selection(rows: Selection, device: torch.device) -> Rows:
    return rows if isinstance(rows, slice) else torch.from_numpy(rows).to(device)
