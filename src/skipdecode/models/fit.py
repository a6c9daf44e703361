"""The fit of a model: bridges over skipped layers, and maps for prompts' keys and values, in one file.

`skipdecode.learning.fitting` finds the maps by least squares; docs/theory.md has the derivation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import Fields
from skipdecode.common.types import PreTrainedModel
from skipdecode.errors import FitError
from skipdecode.models.families import decoder_layers, keys_and_values, unwrap
from skipdecode.models.fit_maps import Bridge, PromptMap
from skipdecode.models.loading.stored import one_line
from skipdecode.schedule import Schedule

FIT_FORMAT = 1
MAX_CONTEXT_TOKENS = 2
_SIZES = ("num_layers", "hidden_size", "taps")  # in a file
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAMES = re.compile(r"(bridges|maps\.\d+)\.(0|[1-9]\d{0,5})\.(\w+)", re.ASCII)
_ATTRIBUTE = "_skipdecode_fit"  # of a loaded model
_MODULE = "skipdecode_fit"  # its name among a model's modules while it is trained


Map = TypeVar("Map", Bridge, PromptMap)
_PARTS: dict[type, tuple[str, ...]] = {Bridge: ("down", "up", "bias"), PromptMap: ("weight", "bias", "first")}


class Fit(nn.Module):
    """The bridges of a model's layers, and its prompt maps for one or more prompt sets.

    `bridges`: by layer. `prompts`: for each prompt set (`Schedule.prompt_layers`), the maps by layer.
    `context_tokens`: number of preceding tokens (*taps*) that a prompt map takes as input. `about`: JSON-ready: a
    sample of the model's weights ("base"), and the settings of the fit.

    Raises FitError: a size, a prompt set, or a tensor's name, shape or values are not accepted.
    """

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        bridges: Mapping[int, Bridge],
        prompts: Mapping[tuple[int, ...], Mapping[int, PromptMap]],
        context_tokens: int = 0,
        about: Fields | None = None,
    ) -> None:
        super().__init__()
        self.num_layers, self.hidden_size, self.context_tokens = num_layers, hidden_size, context_tokens
        self.about = dict(about or {})
        self.prompt_sets = tuple(prompts)
        self.bridges = nn.ModuleDict({str(layer): bridges[layer] for layer in sorted(bridges)})
        self.maps = nn.ModuleList(nn.ModuleDict({str(n): of[n] for n in sorted(of)}) for of in prompts.values())
        self._check()

    @property
    def rank(self) -> float:
        """Mean rank of the bridges; 0 without bridges."""
        ranks = [len(bridge.down) for bridge in self.bridges.values()]  # type: ignore[arg-type]
        return sum(ranks) / max(1, len(ranks))

    def bridges_over(self, layers: Iterable[int]) -> dict[int, Bridge]:
        """The bridges over some layers, by layer; where there is none, the state passes unchanged."""
        bridges: Any = self.bridges
        return {layer: bridges[str(layer)] for layer in layers if str(layer) in bridges}

    def prompt_maps(self, prompt: Iterable[int]) -> dict[int, PromptMap]:
        """The maps for prompts that run the layers `prompt`, by layer; the others' own projections are used."""
        maps: Any = dict(zip(self.prompt_sets, self.maps, strict=True)).get(tuple(prompt), {})
        return {int(layer): prompt_map for layer, prompt_map in maps.items()}

    def of_schedule(self, schedule: Schedule) -> Fit:
        """The part that a schedule uses."""
        prompt = schedule.prompt_layers()
        bridges, maps = self.bridges_over(schedule.dropped), self.prompt_maps(prompt)
        prompts = {prompt: maps} if maps else {}
        return Fit(self.num_layers, self.hidden_size, bridges, prompts, self.context_tokens if maps else 0, self.about)

    def serves(self, schedule: Schedule) -> bool:
        """Whether each layer that a schedule skips has a bridge, and its prompts have maps where they need some."""
        if schedule.projected and schedule.prompt_layers() not in self.prompt_sets:
            return False
        return len(self.bridges_over(schedule.dropped)) == len(schedule.dropped)

    def describe(self) -> str:
        """Describe the maps in words."""
        parts = [f"maps of rank {self.rank:.0f} over {len(self.bridges)} layers"] if len(self.bridges) else []
        parts += [f"keys and values of prompts that run {len(layers)} layers" for layers in self.prompt_sets]
        return ", ".join(parts)

    def check_fits(self, model: PreTrainedModel, name: object = "the fit") -> None:
        """Raise FitError unless the fit has the model's layers and widths."""
        plain = unwrap(model)
        width = plain.config.get_text_config(decoder=True).hidden_size
        self.check_sizes(width, [keys_and_values(layer) for layer in decoder_layers(plain)], name)

    def check_sizes(self, width: int, keys: Sequence[int | None], name: object = "the fit") -> None:
        """Raise FitError unless the fit is for a model of these sizes.

        `width`: columns of a state. `keys`: for each layer the columns of a token's keys and values together; None
        where the layer makes them and the queries in one product, so that they cannot be given.
        """
        if (len(keys), width) != (self.num_layers, self.hidden_size):
            raise FitError(
                f"{name} is for {self.num_layers} layers of {self.hidden_size} columns, but the model has {len(keys)} "
                f"of {width}: fit this model with skipdecode prepare"
            )
        for layer, prompt_map in ((n, prompt_map) for maps in self.maps for n, prompt_map in maps.items()):  # type: ignore[operator]
            wanted = keys[int(layer)]
            if wanted is None:
                raise FitError(
                    f"{name} has keys and values of prompts in layer {layer}, but the model makes them and queries in "
                    "one product: use prompts at full depth or max_exit, or a fit of bridges alone"
                )
            if len(prompt_map.bias) != wanted:
                raise FitError(
                    f"{name} gives {len(prompt_map.bias)} columns of keys and values in layer {layer}, but the model "
                    f"has {wanted} there: fit this model with skipdecode prepare"
                )

    def check_digest(self, digest: str | None, name: object = "the fit") -> None:
        """Raise FitError unless the fit has this digest; None: any."""
        if digest is not None and digest != self.digest():
            raise FitError(
                f"{name}: is not the one that the checkpoint was tuned with: put that file back; to use this one, "
                "delete 'skipdecode_fit' from the checkpoint's config"
            )

    def check_prompts(self, schedule: Schedule, name: object = "the fit") -> None:
        """Raise FitError if prompts of this schedule need maps, and the fit has maps for other prompt sets only."""
        prompt = schedule.prompt_layers()
        if schedule.projected and self.prompt_sets and prompt not in self.prompt_sets:
            fitted = " or ".join(str(list(layers)) for layers in self.prompt_sets)
            raise FitError(
                f"{name} has keys and values of prompts that run layers {fitted}, but under schedule "
                f"{schedule.name!r} they run {list(prompt)}: fit it with skipdecode prepare"
            )

    def digest(self) -> str:
        """A short hash of the tensors and their places; equal only for equal fits."""
        digest = hashlib.sha256(repr((self.num_layers, self.prompt_sets, self.context_tokens)).encode())
        for name, tensor in self.state_dict().items():
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, path: Path | str, state: Mapping[str, Tensor] | None = None) -> None:
        """Write the fit as a safetensors file of 16-bit numbers; raises OutputError if that fails.

        `state` replaces the fit's own tensors, such as by tensors gathered from several devices.
        """
        about = {
            "format": FIT_FORMAT,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "taps": self.context_tokens,
            "prompts": [list(layers) for layers in self.prompt_sets],
            **self.about,
        }
        numbers = (self.state_dict() if state is None else state).items()
        tensors = {name: _narrow(tensor.detach().cpu()).contiguous() for name, tensor in numbers}
        write_whole(path, save(tensors, {"skipdecode.fit": json.dumps(about)}))

    @classmethod
    def load(cls, path: Path | str) -> Fit:
        """The fit of a file that `save` wrote; a FitError names the file and the fault."""
        try:
            if not Path(path).is_file():
                raise OSError("there is no such file")  # a pipe would be waited for
            with safe_open(str(path), "pt") as file:
                about = json.loads((file.metadata() or {}).get("skipdecode.fit", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        except (OSError, SafetensorError, ValueError, TypeError, RuntimeError) as e:  # RecursionError is the last one
            raise FitError(f"fit {path}: cannot be read: {one_line(e)}") from None
        try:
            return cls._of_tensors(about, tensors)
        except (FitError, RecursionError) as e:
            raise FitError(f"fit {path}: {one_line(e)}; make it again with skipdecode prepare") from None

    @classmethod
    def _of_tensors(cls, about: object, tensors: Mapping[str, Tensor]) -> Fit:
        if not isinstance(about, dict) or about.get("format") != FIT_FORMAT:
            raise FitError(f"is no fit of format {FIT_FORMAT}, the one that is accepted")
        sets = about.get("prompts")
        if not isinstance(sets, list) or not all(
            isinstance(layers, list) and all(type(number) is int for number in layers) for layers in sets
        ):
            raise FitError("'prompts' is no list of lists of whole numbers")
        groups: dict[str, dict[int, dict[str, Tensor]]] = {f"maps.{number}": {} for number in range(len(sets))}
        groups["bridges"] = {}
        for name, tensor in tensors.items():
            match = _NAMES.fullmatch(name)
            if match is None or match[1] not in groups:
                raise FitError(f"tensor {name!r} is not known")
            if tensor.dtype not in _TYPES:
                raise FitError(f"tensor {name!r} is of type {tensor.dtype}: floating-point numbers are accepted")
            groups[match[1]].setdefault(int(match[2]), {})[match[3]] = tensor.float()
        bridges = {n: _map_of(Bridge, f"bridges.{n}", parts) for n, parts in groups.pop("bridges").items()}
        maps = [{n: _map_of(PromptMap, f"{name}.{n}", parts) for n, parts in of.items()} for name, of in groups.items()]
        prompts = dict(zip(map(tuple, sets), maps, strict=True))
        if len(prompts) < len(sets):
            raise FitError("'prompts' has a set of layers twice")
        num_layers, hidden_size, context_tokens = (about.get(name) for name in _SIZES)
        settings = {name: value for name, value in about.items() if name not in (*_SIZES, "format", "prompts")}
        return cls(num_layers, hidden_size, bridges, prompts, context_tokens, settings)  # type: ignore[arg-type]

    def _check(self) -> None:
        values = self.num_layers, self.hidden_size, self.context_tokens
        ranges = (1, math.inf), (1, math.inf), (0, MAX_CONTEXT_TOKENS)
        for name, value, (least, most) in zip(_SIZES, values, ranges, strict=True):
            if type(value) is not int or not least <= value <= most:
                up_to = "or more" if most == math.inf else f"to {most}"
                raise FitError(f"{name}={value!r} is not accepted: give a whole number, {least} {up_to}")
        for layers in self.prompt_sets:
            if not all(0 <= n < self.num_layers for n in layers) or list(layers) != sorted({*layers}):
                raise FitError(f"prompt layers {list(layers)}: rising numbers below {self.num_layers} are accepted")
        base = self.about.get("base")
        if base is not None and not (isinstance(base, list) and all(map(_is_number, base))):
            raise FitError("'base', the sample of the model's weights, is not a list of finite numbers")
        width = self.hidden_size
        for layer, bridge in self.bridges.items():
            rank = _rows(bridge.down)
            self._check_tensors(f"bridges.{layer}", bridge, down=(rank, width), up=(width, rank), bias=(width,))
        for number, maps in enumerate(self.maps):
            for layer, prompt_map in maps.items():  # type: ignore[operator]
                rows, columns = _rows(prompt_map.bias), (self.context_tokens + 1) * width
                self._check_tensors(
                    f"maps.{number}.{layer}", prompt_map, weight=(rows, columns), bias=(rows,), first=(rows,)
                )
                if not rows or rows % 2:
                    raise FitError(f"maps.{number}.{layer} gives {rows} columns: keys, and as many values, are needed")

    def _check_tensors(self, name: str, module: nn.Module, **shapes: tuple[int, ...]) -> None:
        layer = int(name.rpartition(".")[2])
        if not 0 <= layer < self.num_layers:
            raise FitError(f"{name!r} is of layer {layer}, but the model has {self.num_layers}")
        for part, shape in shapes.items():
            tensor = getattr(module, part)
            if tuple(tensor.shape) != shape:
                raise FitError(f"tensor '{name}.{part}' is of shape {tuple(tensor.shape)}, {shape} is needed")
            if not torch.isfinite(tensor).all():
                raise FitError(f"tensor '{name}.{part}' has numbers that are not finite")


def set_fit(model: PreTrainedModel, fit: Fit | None) -> None:
    """Store a fit in a loaded model; None: it has none, even if its checkpoint has one.

    Raises FitError if the fit is for another model.
    """
    plain = unwrap(model)
    if fit is not None:
        fit.check_fits(plain)
    plain.__dict__[_ATTRIBUTE] = fit


@contextlib.contextmanager
def temporary_fit(model: PreTrainedModel, fit: Fit | None) -> Iterator[None]:
    """A context in which a loaded model has this fit, or none."""
    before = fit_of(model)
    set_fit(model, fit)
    try:
        yield
    finally:
        set_fit(model, before)


def fit_of(model: PreTrainedModel) -> Fit | None:
    """The fit of a loaded model; None if it has none."""
    fit: Fit | None = unwrap(model).__dict__.get(_ATTRIBUTE)
    return fit


def is_fit_set(model: PreTrainedModel) -> bool:
    """Whether `set_fit` has said which fit a model has, or that it has none."""
    return _ATTRIBUTE in unwrap(model).__dict__


@contextlib.contextmanager
def trainable_fit(model: PreTrainedModel) -> Iterator[None]:
    """A context in which the fit of a model is one of its modules and is trained with the weights."""
    plain, fit = unwrap(model), fit_of(model)
    if fit is not None:
        plain.add_module(_MODULE, fit.requires_grad_(True))
    try:
        yield
    finally:
        if fit is not None:
            del plain._modules[_MODULE]
            fit.requires_grad_(False)


def fit_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a model's state into the state without the trained fit, and the state of the fit."""
    weights, fitted = {}, {}
    for name, tensor in state.items():
        before, mark, part = name.rpartition(f"{_MODULE}.")
        if mark and (not before or before.endswith(".")):
            fitted[part] = tensor
        else:
            weights[name] = tensor
    return weights, fitted


def _narrow(tensor: Tensor) -> Tensor:
    half = tensor.half()
    return half if bool(torch.isfinite(half).all()) else tensor.bfloat16()


def _map_of(kind: type[Map], name: str, parts: Mapping[str, Tensor]) -> Map:
    """A map of a fit from its tensors."""
    if parts.keys() != set(_PARTS[kind]):
        raise FitError(f"{name!r} has the tensors {', '.join(sorted(parts))}: {', '.join(_PARTS[kind])} are needed")
    return kind(**parts)


def _rows(tensor: Any) -> int:
    return int(tensor.shape[0]) if tensor.dim() else 0


def _is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
