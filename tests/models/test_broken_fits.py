"""Files of fits that are damaged, hostile or of another model: a FitError on every engine, never other text."""

from __future__ import annotations

import json
import os
import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors import safe_open
from safetensors.torch import save_file

from fits import random_fit
from skipdecode import Schedule, attach
from skipdecode.engine.fast import FastEngine
from skipdecode.engine.gated import GatedEngine
from skipdecode.engine.kernels.native import native_kernels
from skipdecode.engine.kernels.spec import FitSpec, LinearSpec
from skipdecode.engine.model_reader import read_model
from skipdecode.engine.requests import Request
from skipdecode.errors import FitError, UnfitModelError
from skipdecode.models.checkpoint_schedule import FIT_FILE
from skipdecode.models.fit import Fit, set_fit
from skipdecode.models.loading.fit_file import FitFile
from tiny import LAYERS, shared_model, tiny_model

LOWER = (0, 1, 2)
SCHEDULE = Schedule.even(LAYERS, (5,)).with_prompt(LOWER)
KEY = "skipdecode.fit"


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The tensors and the metadata of a fit that is right for the tiny Llama."""
    path = tmp_path_factory.mktemp("right") / FIT_FILE
    random_fit(shared_model("llama"), [LOWER]).save(path)
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()[KEY])  # noqa: SIM118


def write(path, tensors, about):
    text = about if isinstance(about, str) else json.dumps(about)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {KEY: text})
    return path


def refused(path):
    """No way from the file into a model, on any engine."""
    model = tiny_model("llama")
    with pytest.raises(FitError) as refusal:
        FitFile(path).load(model)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 600
    with pytest.raises(FitError):
        attach(model, SCHEDULE, Fit.load(path))
    with pytest.raises(FitError):
        set_fit(model, Fit.load(path))


ROWS = ("maps.0.5.weight", "maps.0.5.bias", "maps.0.5.first")


def longer(tensors, about):
    for name in ROWS:
        tensors[name] = torch.cat((tensors[name], tensors[name]))


def rows(end):
    return lambda tensors, about: tensors.update({name: tensors[name][:end] for name in ROWS})


def renamed(old, new):
    def change(tensors, about):
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[name.replace(old, new, 1)] = tensors.pop(name)

    return change


def tensor(name, change):
    return lambda tensors, about: tensors.__setitem__(name, change(tensors[name]))


def entry(name, value):
    return lambda tensors, about: about.__setitem__(name, value)


BROKEN = {
    "more keys and values than the model": longer,
    "fewer keys and values than the model": rows(-2),
    "no keys and values": rows(0),
    "an odd number of keys and values": rows(-1),
    "a number in place of a matrix": tensor("bridges.2.down", lambda t: t[0, 0]),
    "integers": tensor("bridges.2.bias", lambda t: t.int()),
    "not finite": tensor("bridges.2.bias", lambda t: t * torch.inf),
    "not finite in 32 bits": tensor("bridges.2.bias", lambda t: t.double() * 1e300),
    "bridges.01": renamed("bridges.2.", "bridges.02."),
    "a negative layer": renamed("bridges.2.", "bridges.-2."),
    "a layer beyond the model": renamed("bridges.2.", f"bridges.{LAYERS}."),
    "a layer of many digits": renamed("bridges.2.", f"bridges.{'9' * 5000}."),
    "a layer in other digits": renamed("bridges.2.", "bridges.٢."),
    "a prompt set that is not there": renamed("maps.0.", "maps.1."),
    "no prompt sets": entry("prompts", []),
    "prompts that are no lists": entry("prompts", [3]),
    "prompts of fractions": entry("prompts", [[0, 1.5, 2]]),
    "prompts of lists": entry("prompts", [[[0], [1]]]),
    "prompts that fall": entry("prompts", [[2, 1, 0]]),
    "prompts beyond the model": entry("prompts", [[0, 1, 99]]),
    "a prompt set twice": entry("prompts", [[0, 1, 2], [0, 1, 2]]),
    "no width": entry("hidden_size", 0),
    "infinitely many taps": entry("taps", float("inf")),
    "taps that are no integer": entry("taps", 1.0),
    "taps that are true": entry("taps", False),
    "too many taps": entry("taps", 3),
    "layers that are no integer": entry("num_layers", float(LAYERS)),
    "a base of NaN": entry("base", [float("nan")] * 64),
    "a base of whole numbers without end": entry("base", [10**400] * 64),
    "a base of truths": entry("base", [True] * 64),
    "a base that is no list": entry("base", {"a": 1}),
    "another format": entry("format", 2),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_fit_is_refused(tmp_path, parts, name):
    tensors, about = dict(parts[0]), dict(parts[1])
    BROKEN[name](tensors, about)
    refused(write(tmp_path / FIT_FILE, tensors, about))


@pytest.mark.parametrize("value", [0.0, 1e308, -1e-308])
def test_a_fit_whose_sample_of_weights_is_another_is_refused(tmp_path, parts, value):
    path = write(tmp_path / FIT_FILE, parts[0], parts[1] | {"base": [value] * 64})
    with pytest.raises(FitError, match="other weights"):
        FitFile(path).load(tiny_model("llama"))


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "7", "{", "[" * 100_000, '{"format": 1e400}', '{"num_layers": ' + "9" * 5000 + "}"]
)
def test_metadata_that_is_no_description_of_a_fit_is_refused(tmp_path, parts, text):
    refused(write(tmp_path / FIT_FILE, parts[0], text))


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe", "absent"):
        refused(tmp_path / name)


SIZES = st.lists(st.sampled_from([0, 1, 2, 4, 8, 31, 32, 33, 64]), max_size=3)
NAMES = st.one_of(
    st.sampled_from([f"bridges.{n}.{p}" for n in (0, 2, 9) for p in ("down", "up", "bias", "x")]),
    st.sampled_from([f"maps.{i}.{n}.{p}" for i in (0, 1) for n in (0, 5, 7) for p in ("weight", "bias", "first")]),
    st.text(max_size=12),
)
TYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)
ABOUT = st.sampled_from(["format", "num_layers", "hidden_size", "taps", "prompts", "base", "rank"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(NAMES, st.tuples(SIZES, TYPES), max_size=3), st.dictionaries(ABOUT, VALUES, max_size=2))
def test_a_fit_is_refused_or_decodes_on_both_engines(tmp_path, parts, changed, told):
    tensors, about = dict(parts[0]), dict(parts[1]) | told
    for name, (shape, kind) in changed.items():
        tensors[name] = torch.ones(shape, dtype=kind)
    path = write(tmp_path / FIT_FILE, tensors, about)
    model = tiny_model("llama").eval()
    try:
        FitFile(path).load(model)
    except FitError:
        with pytest.raises(FitError):
            FitFile(path).load(model)
        return
    request = [Request((5, 6, 7, 8), max_new_tokens=3)]
    engines = FastEngine(model, SCHEDULE, max_rows=1), GatedEngine(model, SCHEDULE, max_rows=1)
    fast, gated = ([row.tokens for row in engine.decode(request)] for engine in engines)
    assert fast == gated


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["llama", "opt", "gemma3_text", "qwen3", "gpt2"]),
    st.lists(st.sets(st.integers(1, LAYERS - 1), max_size=4), max_size=2, unique_by=frozenset),
    st.integers(0, 5),
    st.integers(0, 2),
)
def test_every_right_fit_loads(tmp_path, family, sets, rank, taps):
    model = tiny_model(family)
    prompts = [] if family == "gpt2" else [(0, *sorted(layers)) for layers in sets]
    random_fit(model, prompts, rank=rank, taps=taps).save(tmp_path / FIT_FILE)
    set_fit(model, FitFile(tmp_path / FIT_FILE).load(model))


def test_damaged_bytes_are_refused(tmp_path, parts):
    path = write(tmp_path / FIT_FILE, *parts)
    whole = path.read_bytes()
    for cut in (0, 7, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        refused(path)
    path.write_bytes(struct.pack("<Q", 2**63) + whole[8:])
    refused(path)


def test_the_kernels_refuse_sizes_that_are_not_the_layers():
    model = tiny_model("llama")
    kernels, reason = native_kernels(torch.device("cpu"), torch.float32)
    if kernels is None:
        pytest.skip(reason)
    layers = read_model(model, 8).layers
    width, keys = model.config.hidden_size, 2 * model.config.num_key_value_heads * model.config.head_dim
    right = LinearSpec(torch.zeros(keys, width), torch.zeros(keys))
    kernels.stack(layers, FitSpec({}, {2: right}, {2: torch.zeros(keys)}))
    wrong = [
        FitSpec({}, {2: LinearSpec(torch.zeros(keys + 2, width), torch.zeros(keys + 2))}, {2: torch.zeros(keys + 2)}),
        FitSpec({}, {2: right}, {2: torch.zeros(keys - 2)}),
        FitSpec({}, {LAYERS: right}, {LAYERS: torch.zeros(keys)}),
        FitSpec({2: (LinearSpec(torch.zeros(4, width)), LinearSpec(torch.zeros(width, 3)))}, {}, {}),
    ]
    for spec in wrong:
        with pytest.raises(FitError):
            kernels.stack(layers, spec)
    other = read_model(tiny_model("llama", intermediate_size=96), 8).layers
    with pytest.raises(UnfitModelError):
        kernels.stack([*layers, *other])
    with pytest.raises(UnfitModelError):
        kernels.linear(LinearSpec(torch.zeros(4, width), torch.zeros(3)))
