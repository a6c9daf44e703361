"""Graphs by depth, without a GPU: an engine on a CPU whose CUDA graphs are recorded calls.

vLLM's dispatcher, capture loop and wrapper are real. What stands in for a graph keeps the model's call, with the gates
as they were at its capture, and makes it again at each replay: over the buffers of that time, whatever the step is.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engines import compiled_graphs, engine, generate, paper, prompts, reference, runner_of, save_tiny, set_mode
from skipdecode import Schedule
from skipdecode.errors import UnsupportedFeatureError
from skipdecode.vllm.step_rows import NONE, LayerLimits, StepBatch
from tiny import LAYERS

PAPER = paper("paper", seq_len=16)
FLAT = Schedule.constant(LAYERS, 4, name="flat")
SCATTERED = Schedule(LAYERS, (1, 2, 4, 3), (5,), 1, name="scattered")
SPLIT = Schedule.split(LAYERS, 4, (6, 5, 3), name="split")
FULL = Schedule.full(LAYERS)
MIX = {s.name: s for s in (PAPER, FLAT, SCATTERED, SPLIT, FULL)}


class Recorder:
    """In the place of the model inside vLLM's wrapper, and of what the wrapper captures with."""

    def __init__(self, runner: Any) -> None:
        self.model, self.skipping = runner.model, runner.skipping
        self.replays: Counter[Any] = Counter()
        self.without: Counter[int] = Counter()
        self._under_way: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gates = self.skipping.gates
        output = self.model(*args, **kwargs)
        if self._under_way is not None:
            self._under_way.call = args, kwargs, gates.step, gates.keep, output
        else:
            self.without[len(output)] += 1
        return output

    def new_graph(self) -> Any:
        return SimpleNamespace(call=None, replay=None)

    @contextlib.contextmanager
    def capture(self, graph: Any, **_: Any) -> Iterator[None]:
        from vllm.forward_context import get_forward_context

        descriptor = get_forward_context().batch_descriptor

        def replay() -> None:
            args, kwargs, step, keep, output = graph.call
            self.replays[descriptor] += 1
            as_it_was = contextlib.nullcontext() if step is None else self.skipping.layer_by_layer(step, keep)
            with as_it_was:
                output.copy_(self.model(*args, **kwargs))

        graph.replay = replay
        self._under_way = graph
        yield
        self._under_way = None

    def depths(self) -> Counter[Any]:
        """Replays by level; None: a graph of vLLM's own."""
        counts: Counter[Any] = Counter()
        for descriptor, count in self.replays.items():
            counts[getattr(descriptor, "level", None)] += count
        return counts


@contextlib.contextmanager
def recorded_graphs(llm: Any, sizes: list[int]) -> Iterator[Recorder]:
    """Graphs of decode steps of these sizes, captured by vLLM's loop."""
    from vllm.compilation import cuda_graph
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.config import CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    runner = runner_of(llm)
    mode, model, plain = CUDAGraphMode.FULL_DECODE_ONLY, runner.model, runner.cudagraph_dispatcher
    settings = {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": max(sizes)}
    settings["cudagraph_num_of_warmups"] = 1
    before = {name: getattr(runner.compilation_config, name) for name in settings}
    recorder = Recorder(runner)
    with contextlib.ExitStack() as stack:
        for target, name, stand_in in (
            (torch.cuda, "CUDAGraph", recorder.new_graph),
            (torch.cuda, "graph", recorder.capture),
            (cuda_graph, "capture_pool", lambda *_: contextlib.nullcontext()),
            (cuda_graph, "current_stream", lambda: None),
            (cuda_graph, "weak_ref_tensors", lambda tensors: tensors),
            (type(cuda_graph.current_platform), "get_global_graph_pool", lambda _: None),
        ):
            stack.enter_context(patch.object(target, name, stand_in, create=True))
        try:
            for name, value in settings.items():
                setattr(runner.compilation_config, name, value)
            runner.model = cuda_graph.CUDAGraphWrapper(recorder, runner.vllm_config, CUDAGraphMode.FULL)
            runner.cudagraph_dispatcher = CudagraphDispatcher(runner.vllm_config)
            runner.cudagraph_dispatcher.initialize_cudagraph_keys(mode)
            set_cudagraph_capturing_enabled(True)
            for captured, descriptors in runner.cudagraph_dispatcher.get_capture_descs():
                with torch.inference_mode():
                    runner._capture_cudagraphs(descriptors, captured)
            set_cudagraph_capturing_enabled(False)  # From here on vLLM refuses to capture.
            recorder.without.clear()
            yield recorder
        finally:
            set_cudagraph_capturing_enabled(True)
            runner.model, runner.cudagraph_dispatcher = model, plain
            runner.skipping.graphs.captured.clear()
            for name, value in before.items():
                setattr(runner.compilation_config, name, value)


def expected(model: Any, names: list[str], texts: list[list[int]], new: list[int]) -> list[list[int]]:
    one_by_one = zip(names, texts, new, strict=True)
    return [reference(model, MIX[name], [text], [count])[0] for name, text, count in one_by_one]


def test_a_flat_schedule_compiled(tmp_path: Path):
    """Its rows run the same layers at any age; beside one of every layer they are put back.

    First in the file: an engine that ends takes the process's groups with it.
    """
    model = save_tiny(tmp_path, FLAT)
    texts, new = prompts((9, 4, 17, 30, 1)), [20, 30, 5, 12, 28]
    with (
        engine(tmp_path, enforce_eager=False, max_num_batched_tokens=64) as llm,
        recorded_graphs(llm, [1, 2, 4, 8]) as recorder,
    ):
        compiled, levels = compiled_graphs(), runner_of(llm).skipping.graphs.levels
        assert [(len(level.layers), level.masked) for level in levels] == [(4, False), (LAYERS, True)]
        for names, replayed in (
            (["flat"] * 5, {0}),
            (["full"] * 5, {None}),
            (["flat", "flat", "full", "full", "flat"], {0, 1}),
        ):
            recorder.replays.clear()
            recorder.without.clear()
            assert generate(llm, texts, new, names) == expected(model, names, texts, new)
            assert recorder.depths().keys() == replayed
            assert sum(recorder.without.values()) == 1  # The prompts' step.
        assert compiled_graphs() == compiled


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("llama")
    model = save_tiny(folder, PAPER)
    extra = {"skipdecode": {"schedules": [s.to_dict() for s in MIX.values() if s not in (PAPER, FULL)]}}
    with (
        engine(folder, additional_config=extra, enable_prefix_caching=False) as llm,
        recorded_graphs(llm, [1, 2, 4, 8]) as recorder,
    ):
        yield model, llm, recorder


@pytest.mark.parametrize(
    "names", [*([name] * 6 for name in MIX), [*MIX, "flat"]], ids=lambda names: "+".join(dict.fromkeys(names))
)
def test_tokens_are_those_of_transformers(recorded: Any, names: list[str]):
    model, llm, recorder = recorded
    texts, new = prompts((9, 4, 17, 40, 1, 25)), [20, 30, 5, 12, 28, 16]
    recorder.replays.clear()
    found = generate(llm, texts, new, names)
    assert found == expected(model, names, texts, new)
    assert sum(recorder.replays.values()) >= max(new) - 2
    with patch.object(runner_of(llm).skipping.graphs, "captured", set()):
        set_mode(llm, "where")
        assert generate(llm, texts, new, names) == found
        set_mode(llm, "auto")


def test_rows_that_join_and_leave(recorded: Any):
    """Prompts come in beside answers of all ages: those steps have no graph, and rows change places."""
    model, llm, recorder = recorded
    names = [name for name in MIX for _ in range(4)]
    texts, new = prompts([3 + 7 * n % 31 for n in range(20)]), [2 + 11 * n % 29 for n in range(20)]
    recorder.replays.clear()
    recorder.without.clear()
    assert generate(llm, texts, new, names) == expected(model, names, texts, new)
    assert recorder.without
    assert len(recorder.depths()) > 1


def test_a_graph_of_every_layer_is_never_replayed_in_a_step_that_skips(recorded: Any):
    """Should a vLLM ask elsewhere which graph to take, the step is refused."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor

    skipping = runner_of(recorded[1]).skipping
    batch = StepBatch(*torch.tensor([[9], [1], [4], [0]]).numpy())
    for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
        skipping.step = skipping._limits.step(batch)
        context = SimpleNamespace(
            attn_metadata={"layer": None}, batch_descriptor=BatchDescriptor(1, 1, True), cudagraph_runtime_mode=mode
        )
        with pytest.raises(UnsupportedFeatureError):
            skipping.begin(context)


# ---------------------------------------------------------------------- levels, keys, the buffer


def graphs_for(*schedules: Schedule) -> Any:
    from skipdecode.vllm.graphs import DepthGraphs

    return DepthGraphs(schedules, 64, torch.device("cpu"))


def plain_key(rows: int) -> Any:
    from vllm.forward_context import BatchDescriptor

    return BatchDescriptor(rows, rows, True)


def step_of(schedules: list[Schedule], ages: list[int], asked: list[int]) -> Any:
    """One token of each request."""
    ones = [1] * len(ages)
    return LayerLimits(schedules).step(
        StepBatch(*torch.tensor([[5 + a for a in ages], ones, [5] * len(ages), asked]).numpy())
    )


def test_a_flat_schedule_alone_has_a_graph_without_a_mask_and_one_for_mixed_batches():
    levels = graphs_for(FLAT, FULL).levels
    assert [(sorted(level.layers), level.masked) for level in levels] == [
        (sorted(FLAT.layers(1)), False),
        (list(range(LAYERS)), True),
    ]
    assert all(level.masked for level in graphs_for(FLAT, SCATTERED, FULL).levels)


def test_there_are_few_levels_and_they_spare_most_layers():
    steep = Schedule(12, tuple(range(1, 11)), tuple(range(12, 2, -1)), 1)
    levels = graphs_for(steep, Schedule.full(12)).levels
    assert len(levels) == 4
    depths = sorted(len(level.layers) for level in levels)
    assert depths[0] < 6
    assert depths[-1] == 12
    run = sum(min(d for d in depths if d >= budget) for budget in steep.budgets)
    best = min(
        sum(min(d for d in (a, b, c, 12) if d >= budget) for budget in steep.budgets)
        for a in range(3, 12)
        for b in range(a, 12)
        for c in range(b, 12)
    )
    assert run <= 1.05 * best


def test_keys_differ_by_level_and_from_vllms_own():
    from skipdecode.vllm.graphs import DepthDescriptor

    plain = plain_key(8)
    keys = [plain, *(DepthDescriptor(**asdict(plain), level=n) for n in range(3))]
    assert len(set(keys)) == 4
    assert keys[1] == DepthDescriptor(**asdict(plain), level=0)


def test_the_number_of_graphs_is_bounded():
    graphs = graphs_for(PAPER, FULL)
    for sizes, levels in ((8, 4), (100, 2), (300, 0)):
        graphs.captured.clear()
        graphs.capture(plain_key(8), sizes, lambda step, keep: None)
        assert len(graphs.captured) == levels


def captured(*schedules: Schedule, rows: int = 8) -> Any:
    graphs = graphs_for(*schedules)
    graphs.capture(plain_key(rows), 8, lambda step, keep: None)
    return graphs


def test_the_buffer_says_which_rows_run_which_layer():
    from skipdecode.vllm.graphs import DepthDescriptor

    graphs, ages = captured(PAPER, FULL), [1, 15, 4, 9, 1]
    step = step_of([PAPER, FULL], ages, [0, 0, 0, 0, 1])
    level = graphs.level_of(step)
    graphs.keep.fill_(True)
    graphs.fill(step, DepthDescriptor(**asdict(plain_key(8)), level=level))
    schedules = [PAPER] * 4 + [FULL]
    for row, (age, schedule) in enumerate(zip(ages, schedules, strict=True)):
        assert graphs.keep[row].nonzero().flatten().tolist() == list(schedule.layers(age)), row
    assert not graphs.keep[5:8].any()
    assert graphs.keep[8:].all()


def test_a_level_holds_every_layer_of_the_step():
    graphs = captured(PAPER, FLAT, FULL)
    for ages, asked in (([1, 1], [0, 0]), ([15, 2], [0, 0]), ([15, 15], [0, 1]), ([3, 9], [1, 1]), ([40, 40], [0, 2])):
        step = step_of([PAPER, FLAT, FULL], ages, asked)
        level = graphs.levels[graphs.level_of(step)]
        assert {n for n, kind in enumerate(step.layers) if kind != NONE} <= level.layers
        assert level.masked or not step.parts


def test_no_graph_where_none_was_captured_or_prompt_rows_are_projected():
    step = step_of([SPLIT], [1], [0])
    assert graphs_for(SPLIT).level_of(step) is None
    graphs = captured(SPLIT)
    assert graphs.level_of(step) is not None
    one_prompt_token = step_of([SPLIT], [-3], [0])
    assert any(kind != NONE for kind in one_prompt_token.projects)
    assert graphs.level_of(one_prompt_token) is None


def test_without_a_graph_a_step_that_skips_gets_no_padding_either():
    from vllm.config import CUDAGraphMode

    asked: list[Any] = []

    def determine(**kwargs: Any) -> Any:
        asked.append(kwargs)
        return CUDAGraphMode.NONE if kwargs.get("force_eager") else CUDAGraphMode.FULL, plain_key(8), "rest"

    graphs, step = graphs_for(FLAT), step_of([FLAT], [3] * 5, [0] * 5)
    assert graphs.dispatch(step, determine, num_tokens=5) == (CUDAGraphMode.NONE, plain_key(8), "rest")
    assert asked == [{"num_tokens": 5, "force_eager": True}]
    # At full depth, or in a dummy run, the answer is vLLM's.
    assert graphs.dispatch(None, determine, num_tokens=5) == (CUDAGraphMode.FULL, plain_key(8), "rest")


# ---------------------------------------------------------------------- metadata on a GPU


def test_builders_that_plan_into_memory_in_use_are_told_from_others():
    from skipdecode.vllm.metadata import StepMetadata

    def metadata(kind: str) -> tuple[bool, Any]:
        builder = type(kind, (), {"build": lambda *_: None, "supports_update_block_table": True})()
        group = SimpleNamespace(layer_names=["a"], metadata_builders=[builder])
        return StepMetadata([[group]], {0: ["a"]}).repeatable, builder

    for kind, repeatable in (("FlashAttentionMetadataBuilder", True), ("FlashInferMetadataBuilder", False)):
        found, builder = metadata(kind)
        assert found is repeatable
        assert not builder.supports_update_block_table
