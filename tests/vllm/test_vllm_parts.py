"""The parts of the vLLM plugin that need no vLLM: settings, rows, gates. The rest is in tests/vllm/plugin."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode import Schedule
from skipdecode.errors import ScheduleError, UnsupportedModelError, UsageError
from skipdecode.models.fit_maps import Bridge, prompt_features
from skipdecode.vllm.gates import PROJECTS, LayerGates, check_projects
from skipdecode.vllm.projection import ContextMemory, LayerBridge, context_rows
from skipdecode.vllm.settings import PluginSettings
from skipdecode.vllm.step_rows import ALL, NONE, LayerLimits, StepBatch, StepRows
from tiny import LAYERS, SCHEDULES

LOADED = [
    *SCHEDULES.values(),
    Schedule.full(LAYERS),
    Schedule.constant(LAYERS, 3, prompt="max_exit"),
    Schedule.split(LAYERS, 4, (6, 5, 3)),
    Schedule(LAYERS, (1, 2, 4, 3), (6, 5, 4), 1, (0, 2, 5)),  # The last layer is projected, one below it runs.
]
BRIDGED = (0, 2, 3, 4, 6, 7)
REQUESTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(1, 25), st.integers(0, len(LOADED) - 1)),
    min_size=1,
    max_size=7,
)


def batch_of(requests: list[tuple[int, int, int, int]]) -> StepBatch:
    return StepBatch(*np.array(requests, np.int64).T)


def runs(schedule: Schedule, layer: int, token: int, prompt: int) -> bool:
    if token == prompt - 1:
        return layer in schedule.last_prompt_layers()
    return layer in (schedule.prompt_layers() if token < prompt else schedule.layers(token - prompt))


def projects(schedule: Schedule, layer: int, token: int, prompt: int) -> bool:
    return token < prompt - 1 and layer in schedule.projected


def chosen(step: StepRows | None, layer: int, rows: int) -> list[int]:
    """The rows that a step says run a layer."""
    return listed(step, ALL if step is None else step.layers[layer], rows)


def listed(step: StepRows | None, kind: int, rows: int) -> list[int]:
    if kind in (ALL, NONE):
        return list(range(rows)) if kind == ALL else []
    return np.arange(rows)[step.parts[kind].rows].tolist()  # type: ignore[union-attr]


def crosses(schedule: Schedule, layer: int, token: int, prompt: int) -> bool:
    """Whether a token takes the layer's bridge: all that skip it, but prompt tokens with layers of their own."""
    own = schedule.prompt != "max_exit" and token < prompt - 1
    return not runs(schedule, layer, token, prompt) and not own


@settings(max_examples=150)
@given(REQUESTS)
def test_rows_are_those_of_the_schedules(requests: list[tuple[int, int, int, int]]):
    step = LayerLimits(LOADED, BRIDGED).step(batch_of(requests))
    tokens = [(s, n, prompt) for start, rows, prompt, s in requests for n in range(start, start + rows)]
    for layer in range(LAYERS):
        expected = [i for i, (s, n, prompt) in enumerate(tokens) if runs(LOADED[s], layer, n, prompt)]
        assert chosen(step, layer, len(tokens)) == expected
        stored = [i for i, (s, n, prompt) in enumerate(tokens) if projects(LOADED[s], layer, n, prompt)]
        assert listed(step, NONE if step is None else step.projects[layer], len(tokens)) == stored
        across = [i for i, (s, n, prompt) in enumerate(tokens) if crosses(LOADED[s], layer, n, prompt)]
        if step is not None:
            assert listed(step, step.bridge(layer), len(tokens)) == (across if layer in BRIDGED else [])
            assert step.starts is None or np.flatnonzero(step.starts).tolist() == [
                i for i, (_, n, _) in enumerate(tokens) if n == 0
            ]
            assert step.schedules is None or step.schedules.tolist() == [s for s, _, _ in tokens]


@settings(max_examples=80)
@given(REQUESTS)
def test_parts_say_what_is_cut(requests: list[tuple[int, int, int, int]]):
    batch = batch_of(requests)
    step = LayerLimits(LOADED).step(batch)
    for part in step.parts if step else ():
        every = np.arange(step.num_rows)  # type: ignore[union-attr]
        assert (part.lead + part.counts + part.cut == batch.rows[part.requests]).all()
        starts = (np.cumsum(batch.rows) - batch.rows)[part.requests] + part.lead
        ranges = [np.arange(s, s + n) for s, n in zip(starts, part.counts, strict=True)]
        assert every[part.rows].tolist() == np.concatenate(ranges).tolist()
        assert part.counts.sum() == len(every[part.rows])


def test_a_batch_in_order_of_depth_has_one_slice_a_layer():
    schedule = SCHEDULES["paper"]
    ages = [20, 6, 4, 2, 0]
    requests = [(10 + age, 1, 10, 0) for age in ages] + [(0, 7, 7, 0)]
    step = LayerLimits([schedule]).step(batch_of(requests))
    assert step is not None
    assert all(isinstance(part.rows, slice) and part.rows.stop == 12 for part in step.parts)
    depth = LayerLimits([schedule]).depth(batch_of(requests))
    assert depth.tolist() == [*[schedule.budget(age) for age in ages], LAYERS]


def test_full_depth_needs_no_plan():
    limits = LayerLimits([Schedule.full(LAYERS), SCHEDULES["paper"]])
    assert limits.step(batch_of([(12, 1, 4, 0), (0, 5, 5, 0)])) is None
    assert limits.step(batch_of([(0, 5, 5, 1)])) is None


# ---------------------------------------------------------------------- gates


class Residual(torch.nn.Module):
    """A layer as vLLM writes most of them: adds what it was given into the residual, in place."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        assert positions.shape[0] == hidden_states.shape[0]
        if residual is None:
            residual = hidden_states
        else:
            residual += hidden_states
        return (residual * 0.5).sin() + self.number + positions[:, None], residual


class Plain(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, hidden_states: Any) -> Any:
        return hidden_states + (hidden_states + self.number).sin()


class Keys(torch.nn.Module):
    """Stands for the keys and values of a state, and for the cache."""

    maps = None

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[int, torch.Tensor] = {}

    def forward(self, hidden_states: Any, residual: Any = None, positions: Any = None) -> Any:
        states = hidden_states if residual is None else hidden_states + residual
        return states, states if positions is None else states + positions[:, None]

    def store(self, keys: Any, values: Any, slots: Any) -> None:
        self.stored |= {s: torch.cat(pair) for s, *pair in zip(slots.tolist(), keys, values, strict=True)}


def bridge() -> LayerBridge:
    made = Bridge(torch.randn(2, 3), torch.randn(3, 2), torch.randn(3))
    return LayerBridge(made, 4, torch.float64, torch.device("cpu"))


@settings(max_examples=60)
@given(requests=REQUESTS)
def test_gates_leave_other_rows_as_they_were(requests: list[tuple[int, int, int, int]]):
    step = LayerLimits(LOADED, BRIDGED).step(batch_of(requests))
    if step is None:
        return
    rows = step.num_rows
    bridges = {n: bridge() for n in BRIDGED}
    positions, given_states = torch.arange(rows, dtype=torch.float64), torch.randn(rows, 3, dtype=torch.float64)
    for layer_class, takes_residual in ((Residual, True), (Plain, False)):
        state, passing = given_states.clone(), []
        for number in range(LAYERS):
            layer, index = layer_class(number), chosen(step, number, rows)
            passing.append(state.clone())
            across = listed(step, step.bridge(number), rows)
            out = layer(positions[index], state[index], None) if takes_residual else layer(state[index])
            if across:
                state[across] = bridges[number](state[across])
            state[index] = out[0] + out[1] if takes_residual else out
        layers = {n: layer_class(n) for n in range(LAYERS)}
        gates = LayerGates(layers)
        gates.projections = {number: Keys() for number in range(LAYERS)}  # type: ignore[misc]
        gates.bridges = bridges
        slots = {n: torch.tensor(listed(step, kind, rows)) for n, kind in enumerate(step.projects) if kind != NONE}
        gates.begin(step, torch.device("cpu"), slots)
        hidden, residual = given_states.clone(), None
        for layer in layers.values():
            if takes_residual:
                hidden, residual = layer(positions, hidden, residual)
            else:
                hidden = layer(hidden)
        gates.end()
        torch.testing.assert_close(hidden if residual is None else hidden + residual, state)
        for number, keys in gates.projections.items():
            wanted = listed(step, step.projects[number], rows)
            assert sorted(keys.stored) == wanted  # type: ignore[attr-defined]
            for row in wanted:
                moved = passing[number][row] + (positions[row] if takes_residual else 0)
                torch.testing.assert_close(keys.stored[row], torch.cat([passing[number][row], moved]))  # type: ignore


def test_a_layer_of_another_kind_is_refused():
    with pytest.raises(UnsupportedModelError, match="Linear take no hidden_states"):
        LayerGates({0: torch.nn.Linear(2, 2)})


# ---------------------------------------------------------------------- settings


def asking(**extra: str) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))


def test_settings_travel_as_json():
    made = PluginSettings.from_config(LOADED[0].to_dict(), {"policy": "refill"})
    assert made is not None
    assert [s.name for s in made.schedules] == [LOADED[0].name, "full"]
    assert PluginSettings.from_config(None, made.to_dict()) == made
    assert [made.index_of(asking(**asked)) for asked in ({}, {"skipdecode": "full"})] == [0, 1]
    with pytest.raises(ScheduleError, match="unknown schedule 'fast': this server has 'skipdecode', 'full'"):
        made.index_of(asking(skipdecode="fast"))


def test_a_schedule_that_projects_prompts_is_refused_by_name():
    halves = Schedule.split(8, 4, 4, name="halves")
    check_projects([halves], "LlamaForCausalLM")
    check_projects([LOADED[0]], "Olmo2ForCausalLM", "fp8")
    for architecture, quantization in (("Olmo2ForCausalLM", None), ("LlamaForCausalLM", "fp8")):
        with pytest.raises(ScheduleError, match=f"'halves'.*{quantization or architecture}"):
            check_projects([halves], architecture, quantization)


def test_the_page_lists_the_architectures():
    page = (Path(__file__).resolve().parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
    for projects, row in ((True, "yes"), (False, "no")):
        names = re.search(rf"^\| {row} \| (.+) \|$", page, re.MULTILINE)
        listed = [f"{name}ForCausalLM" for name in names[1].split(", ")] if names else []
        assert listed == [name for name, known in PROJECTS.items() if known == projects]


def test_settings_without_a_schedule():
    assert PluginSettings.from_config(None, None) is None
    with pytest.raises(ScheduleError, match="policy was given, but there is no schedule"):
        PluginSettings.from_config(None, {"policy": "refill"})
    with pytest.raises(UsageError, match="unknown option 'speed'"):
        PluginSettings.from_config(LOADED[0].to_dict(), {"speed": 2})


@given(st.integers(1, 2), st.integers(9, 30), st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=8))
@settings(max_examples=60, deadline=None)
def test_states_before_rows(taps: int, length: int, chunks: list[tuple[int, int]]) -> None:
    """Two prompts with one block in common, in chunks: each row gets the states of the tokens before its own."""
    block, width, prompts = 4, 3, np.array([length, length + 5])
    states = [torch.randn(n, width) for n in prompts]
    states[1][:block] = states[0][:block]
    blocks = np.stack([np.arange(1, 21), np.arange(21, 41)]).astype(np.int32)
    blocks[1, 0] = blocks[0, 0]
    memory, done = ContextMemory(taps, {5: (5,)}), np.array([0, block])
    for requested in [(block + 1, 2), *chunks, *[(9, 9)] * 4]:
        rows = np.minimum(requested, prompts - done)
        batch = StepBatch(done, rows, prompts, np.zeros(2, np.int64))
        memory.begin(context_rows(batch, taps, blocks, block), torch.device("cpu"))
        in_step = torch.cat([s[at : at + n] for s, at, n in zip(states, done, rows, strict=True)])
        found = memory.context(5, lambda in_step=in_step: in_step)
        memory.end()
        wanted = [
            prompt_features(s[None], None, None, taps)[0][0, at : at + n, width:]
            for s, at, n in zip(states, done, rows, strict=True)
        ]
        torch.testing.assert_close(found, torch.cat(wanted))
        done = done + rows
