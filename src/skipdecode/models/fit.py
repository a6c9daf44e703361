"""Fitted linear maps for skipped work: bridges over skipped layers, and prompt maps for keys and values.

Both are maps of one token's state, divided by its root mean square. A prompt map may also take the states of the tokens
just before, the *taps*. So layer sets stay nested, the cache does not grow, and results do not depend on the batch.
`skipdecode.calibration.fitting` finds the maps by least squares; docs/theory.md has the derivation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from skipdecode.common.files import write_whole
from skipdecode.errors import FitError
from skipdecode.models.carried import FIT_FILE
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.schedule import Schedule

__all__ = [
    "EPSILON",
    "FIT_FILE",
    "FIT_FORMAT",
    "Bridge",
    "Fit",
    "PromptMap",
    "fit_of",
    "fit_state",
    "keep_fit",
    "normed",
    "prompt_features",
    "trainable_fit",
]

FIT_FORMAT = 1
MOST_TAPS = 2
EPSILON = 1e-6
_KEPT = "_skipdecode_fit"
_TRAINED = "skipdecode_fit"  # its name among a model's modules while it is trained


def normed(hidden: Tensor) -> Tensor:
    """States (…, hidden_size) divided by their root mean square, in fp32 (fp64 stays)."""
    hidden = hidden if hidden.dtype == torch.float64 else hidden.float()
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + EPSILON)


def prompt_features(hidden: Tensor, text: Tensor | None, before: Tensor | None, taps: int) -> tuple[Tensor, Tensor]:
    """The inputs of a `PromptMap`: normed states, each with those of the `taps` columns before it.

    Parameters
    ----------
    hidden : Tensor
        (rows, columns, hidden_size)
    text : Tensor or None
        (rows, columns), bool; False marks padding, which counts as zeros. None: all columns are text.
    before : Tensor or None
        (rows, taps, hidden_size), normed states in front of the first column; None: zeros.

    Returns
    -------
    (Tensor, Tensor)
        The features (rows, columns, (taps + 1) * hidden_size), and `before` for the next columns.
    """
    states = normed(hidden)
    if text is not None:
        states = states * text.unsqueeze(-1)
    if before is None:
        before = states.new_zeros(states.shape[0], taps, states.shape[2])
    longer, columns = torch.cat((before, states), 1), states.shape[1]
    shifted = [longer[:, taps - tap : taps - tap + columns] for tap in range(taps + 1)]
    return torch.cat(shifted, -1), longer[:, columns:]


class Bridge(nn.Module):
    """The map that replaces a skipped layer: it adds ``up @ down @ normed(h) + bias`` to a token's state h.

    Parameters
    ----------
    down, up : Tensor
        (rank, hidden_size) and (hidden_size, rank); with rank 0 the bias is all.
    bias : Tensor
        (hidden_size,)
    """

    def __init__(self, down: Tensor, up: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.down, self.up, self.bias = (nn.Parameter(t, requires_grad=False) for t in (down, up, bias))

    def forward(self, hidden: Tensor) -> Tensor:
        """The states (…, hidden_size) after the bridge, in their own dtype."""
        added = normed(hidden) @ self.down.float().T @ self.up.float().T + self.bias.float()
        return (hidden.float() + added).to(hidden.dtype)


class PromptMap(nn.Module):
    """Maps prompt tokens to keys and values of a layer that they skip, before rotary positions and a norm of keys.

    Parameters
    ----------
    weight : Tensor
        (keys + values, (taps + 1) * hidden_size): columns of the token's own normed state first, then of the taps.
    bias, first : Tensor
        (keys + values,); `first` replaces the map at the first token of a text, whose state is an outlier.
    """

    def __init__(self, weight: Tensor, bias: Tensor, first: Tensor) -> None:
        super().__init__()
        self.weight, self.bias, self.first = (nn.Parameter(t, requires_grad=False) for t in (weight, bias, first))

    def forward(self, features: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each (rows, columns, width), from `prompt_features`.

        `is_first` (rows, columns) marks the first tokens of texts.
        """
        made = features @ self.weight.float().T + self.bias.float()
        made = torch.where(is_first[..., None], self.first.float(), made)
        keys, values = made.chunk(2, -1)
        return keys, values


class Fit(nn.Module):
    """The bridges of a model's layers, and its prompt maps for one or more prompt sets.

    Parameters
    ----------
    bridges : mapping of int to Bridge
        By layer.
    prompts : mapping of tuple of int to mapping of int to PromptMap
        For each prompt set (`Schedule.prompt_layers`), the maps by layer.
    taps : int
        Number of preceding tokens that a prompt map takes as input.
    about : dict
        JSON-ready: a sample of the model's weights ("base"), and the settings of the fit.

    Raises
    ------
    FitError
        A tensor of a wrong shape, or one that is not finite.
    """

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        bridges: Mapping[int, Bridge],
        prompts: Mapping[tuple[int, ...], Mapping[int, PromptMap]],
        taps: int = 0,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.num_layers, self.hidden_size, self.taps, self.about = num_layers, hidden_size, taps, dict(about or {})
        self.prompt_sets = tuple(prompts)
        self.bridges = nn.ModuleDict({str(layer): bridges[layer] for layer in sorted(bridges)})
        self.maps = nn.ModuleList(nn.ModuleDict({str(n): of[n] for n in sorted(of)}) for of in prompts.values())
        self._check()

    @property
    def rank(self) -> float:
        """Mean rank of the bridges; 0 without bridges."""
        ranks = [len(bridge.down) for bridge in self.bridges.values()]  # type: ignore[arg-type]
        return sum(ranks) / max(1, len(ranks))

    def bridge(self, layer: int) -> Bridge | None:
        """The bridge over a layer; None if the state passes unchanged."""
        return getattr(self.bridges, str(layer), None)

    def prompt_map(self, prompt: Iterable[int], layer: int) -> PromptMap | None:
        """The map of a layer for prompts that run the layers `prompt`; None if the layer's own projection is used."""
        wanted = tuple(prompt)
        for layers, maps in zip(self.prompt_sets, self.maps, strict=True):
            if layers == wanted:
                return getattr(maps, str(layer), None)
        return None

    def of_schedule(self, schedule: Schedule) -> Fit:
        """The part that a schedule uses."""
        layers, prompt = range(self.num_layers), schedule.prompt_layers()
        bridges = {n: bridge for n in schedule.dropped if (bridge := self.bridge(n)) is not None}
        maps = {n: made for n in layers if (made := self.prompt_map(prompt, n)) is not None}
        prompts = {prompt: maps} if maps else {}
        return Fit(self.num_layers, self.hidden_size, bridges, prompts, self.taps if maps else 0, self.about)

    def serves(self, schedule: Schedule) -> bool:
        """Whether each layer that a schedule skips has a bridge, and its prompts have maps where they need some."""
        asked = schedule.prompt_layers()
        return all(self.bridge(layer) is not None for layer in schedule.dropped) and not (
            schedule.projected and asked not in self.prompt_sets
        )

    def describe(self) -> str:
        """What it has, in words."""
        parts = [f"bridges of rank {self.rank:.0f} over {len(self.bridges)} layers"] if len(self.bridges) else []
        parts += [f"keys and values of prompts that run {len(layers)} layers" for layers in self.prompt_sets]
        return ", ".join(parts)

    def check_fits(self, model: Any, name: object = "the fit") -> None:
        """Raise FitError unless the fit has the model's layers and widths."""
        plain = unwrap(model)
        self.check_sizes(len(decoder_layers(plain)), plain.config.get_text_config(decoder=True).hidden_size, name)

    def check_sizes(self, layers: int, width: int, name: object = "the fit") -> None:
        """Raise FitError unless the fit is for a model with these numbers of layers and columns."""
        if (layers, width) != (self.num_layers, self.hidden_size):
            raise FitError(
                f"{name} is for {self.num_layers} layers of {self.hidden_size} columns, but the model has {layers} of "
                f"{width}: fit this model with skipdecode calibrate"
            )

    def check_prompts(self, schedule: Schedule, name: object = "the fit") -> None:
        """Raise FitError if prompts of this schedule need maps, and the fit has maps for other prompt sets only."""
        asked = schedule.prompt_layers()
        if schedule.projected and self.prompt_sets and asked not in self.prompt_sets:
            made = " or ".join(str(list(layers)) for layers in self.prompt_sets)
            raise FitError(
                f"{name} has keys and values of prompts that run layers {made}, but under schedule "
                f"{schedule.name!r} they run {list(asked)}: fit it with skipdecode calibrate"
            )

    def digest(self) -> str:
        """A short hash of the tensors and their places; equal only for equal fits."""
        found = hashlib.sha256(repr((self.num_layers, self.prompt_sets, self.taps)).encode())
        for name, tensor in self.state_dict().items():
            found.update(f"{name} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()[:16]

    def save(self, path: Path | str, state: Mapping[str, Tensor] | None = None) -> None:
        """Write the fit as a safetensors file of 16-bit numbers; raises OutputError if that fails.

        `state` replaces the fit's own tensors, such as by tensors gathered from several devices.
        """
        about = {
            "format": FIT_FORMAT,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "taps": self.taps,
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
            with safe_open(str(path), "pt") as file:
                about = json.loads((file.metadata() or {}).get("skipdecode.fit", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        except (OSError, SafetensorError, ValueError) as e:
            raise FitError(f"fit {path}: cannot be read: {e}") from None
        try:
            return cls._of_tensors(about, tensors)
        except FitError as e:
            raise FitError(f"fit {path}: {e}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise FitError(f"fit {path}: is no fit of format {FIT_FORMAT} ({e!r}): make it with calibrate") from None

    @classmethod
    def _of_tensors(cls, about: Any, tensors: dict[str, Tensor]) -> Fit:
        about = dict(about)
        if about.pop("format") != FIT_FORMAT:
            raise FitError(f"format {FIT_FORMAT} is accepted, no other: make it again with skipdecode calibrate")
        sets = [tuple(map(int, layers)) for layers in about.pop("prompts")]
        bridges: dict[int, dict[str, Tensor]] = {}
        maps: dict[tuple[int, ...], dict[int, dict[str, Tensor]]] = {layers: {} for layers in sets}
        for name, tensor in tensors.items():
            match name.split("."):
                case "bridges", layer, part:
                    bridges.setdefault(int(layer), {})[part] = tensor.float()
                case "maps", number, layer, part:
                    maps[sets[int(number)]].setdefault(int(layer), {})[part] = tensor.float()
                case _:
                    raise FitError(f"tensor {name!r} is not known")
        num_layers, hidden_size, taps = (about.pop(name) for name in ("num_layers", "hidden_size", "taps"))
        return cls(
            num_layers,
            hidden_size,
            {layer: Bridge(**parts) for layer, parts in bridges.items()},
            {layers: {n: PromptMap(**parts) for n, parts in of.items()} for layers, of in maps.items()},
            taps,
            about,
        )

    def _check(self) -> None:
        width = self.hidden_size
        if not 0 <= self.taps <= MOST_TAPS:
            raise FitError(f"taps={self.taps} is not accepted: give 0 to {MOST_TAPS}")
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, bridge in self.bridges.items():
            rank = int(bridge.down.shape[0])  # type: ignore[index]
            shapes[f"bridges.{layer}.down"], shapes[f"bridges.{layer}.up"] = (rank, width), (width, rank)
            shapes[f"bridges.{layer}.bias"] = (width,)
        for number, maps in enumerate(self.maps):
            for layer, made in maps.items():  # type: ignore[operator]
                rows = len(made.bias)
                shapes[f"maps.{number}.{layer}.weight"] = rows, (self.taps + 1) * width
                shapes[f"maps.{number}.{layer}.first"] = (rows,)
        for name, tensor in self.state_dict().items():
            layer = name.split(".")[-2]
            if int(layer) >= self.num_layers:
                raise FitError(f"tensor {name!r} is of layer {layer}, but the model has {self.num_layers}")
            if name in shapes and tuple(tensor.shape) != shapes[name]:
                raise FitError(f"tensor {name!r} is of shape {tuple(tensor.shape)}, {shapes[name]} is needed")
            if not torch.isfinite(tensor).all():
                raise FitError(f"tensor {name!r} has numbers that are not finite: fit again, on more tokens")


def keep_fit(model: Any, fit: Fit | None) -> None:
    """Store a fit in a loaded model; None removes it. Raises FitError if the fit is for another model."""
    plain = unwrap(model)
    if fit is None:
        plain.__dict__.pop(_KEPT, None)
        return
    fit.check_fits(plain)
    plain.__dict__[_KEPT] = fit


def fit_of(model: Any) -> Fit | None:
    """The fit of a loaded model; None if it has none."""
    found: Fit | None = unwrap(model).__dict__.get(_KEPT)
    return found


@contextlib.contextmanager
def trainable_fit(model: Any) -> Iterator[None]:
    """A context in which the fit of a model is one of its modules and is trained with the weights."""
    plain, fit = unwrap(model), fit_of(model)
    if fit is not None:
        plain.add_module(_TRAINED, fit.requires_grad_(True))
    try:
        yield
    finally:
        if fit is not None:
            del plain._modules[_TRAINED]
            fit.requires_grad_(False)


def fit_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a model's state into the state without the trained fit, and the state of the fit."""
    weights, fitted = {}, {}
    for name, tensor in state.items():
        before, found, own = name.rpartition(f"{_TRAINED}.")
        if found and (not before or before.endswith(".")):
            fitted[own] = tensor
        else:
            weights[name] = tensor
    return weights, fitted


def _narrow(tensor: Tensor) -> Tensor:
    half = tensor.half()
    return half if bool(torch.isfinite(half).all()) else tensor.bfloat16()
