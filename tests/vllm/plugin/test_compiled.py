"""Compiled layers: what is compiled when, and which layers share it."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from engines import compiled_graphs, engine, paper, pieces_of, prompts, save_tiny
from skipdecode import Schedule
from skipdecode.vllm.compiled import BLOCK, LayerPieces
from tiny import LAYERS

STEPS = 1000
MIX = (
    paper("paper"),
    Schedule.constant(LAYERS, 4, name="constant"),
    Schedule.split(LAYERS, 4, (6, 5, 3), name="split"),
    Schedule.full(LAYERS),
)


def test_nothing_is_compiled_in_a_thousand_steps_and_memory_is_steady(tmp_path: Path):
    from vllm import SamplingParams

    save_tiny(tmp_path, MIX[0])
    extra = {"skipdecode": {"schedules": [s.to_dict() for s in MIX[1:]]}}
    draw, process, used = random.Random(5), psutil.Process(), []
    with engine(tmp_path, enforce_eager=False, additional_config=extra, max_num_batched_tokens=40) as llm:
        core = llm.llm_engine
        graphs, pieces = compiled_graphs(), pieces_of(llm).count
        assert pieces == 5  # The first layer, the others, four of them, the last norm, and one for keys and values.
        for step in range(STEPS):
            if step % 50 == 0:
                gc.collect()
                used.append(process.memory_info().rss)
            while not core.has_unfinished_requests() or draw.random() < 0.1:
                name, text = draw.choice(MIX).name, prompts((draw.randint(1, 90),), seed=draw.randint(0, 99))[0]
                parameters = SamplingParams(
                    temperature=0, max_tokens=draw.randint(1, 40), detokenize=False, extra_args={"skipdecode": name}
                )
                core.add_request(f"{step} {draw.random()}", {"prompt_token_ids": text}, parameters)
            core.step()
        assert (compiled_graphs(), pieces_of(llm).count) == (graphs, pieces)
    assert max(used[15:]) - max(used[5:10]) < 16 * 2**20


# ---------------------------------------------------------------------- which layers share a piece


class Layer(torch.nn.Module):
    def __init__(self, factor: float, bias: bool = True) -> None:
        super().__init__()
        self.factor = factor
        self.linear = torch.nn.Linear(8, 8, bias=bias)

    def forward(self, hidden_states: Any, residual: Any) -> Any:
        hidden_states = self.linear(hidden_states) * self.factor
        return hidden_states if residual is None else hidden_states + residual


def pieces_for() -> LayerPieces:
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig

    settings = CompilationConfig(mode=CompilationMode.DYNAMO_TRACE_ONCE, backend="inductor")
    return LayerPieces(VllmConfig(compilation_config=settings), 0)


def check_as_eager(pieces: LayerPieces, layer: Layer) -> None:
    """For several numbers of rows, one too."""
    generator = torch.Generator().manual_seed(3)
    for rows in (12, 1, 5):
        hidden, residual = torch.randn(2, rows, 8, generator=generator)
        arguments = {"hidden_states": hidden, "residual": residual}
        with torch.no_grad():
            found = pieces(type(layer).forward, layer, arguments)
            torch.testing.assert_close(found, layer(**arguments), atol=1e-5, rtol=1e-5)


@pytest.fixture
def said() -> Iterator[list[Any]]:
    """What the log is told of layers; not by caplog, because vLLM sets up logging anew when an engine starts."""

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    records: list[Any] = []
    handler, log = Kept(), logging.getLogger("vllm.skipdecode")
    log.addHandler(handler)
    yield records
    log.removeHandler(handler)


def test_layers_share_a_piece_only_if_they_are_alike():
    pieces = pieces_for()
    for layer, made in (
        (Layer(2.0), 1),
        (Layer(2.0), 1),
        (Layer(3.0), 2),
        (Layer(2.0, bias=False), 3),
        (Layer(3.0), 3),
    ):
        check_as_eager(pieces, layer)
        assert pieces.count == made


class Pair(Layer):
    def forward(self, hidden_states: Any, residual: Any) -> Any:
        return self.linear(hidden_states) * self.factor, hidden_states + residual


def test_a_block_is_made_at_start_only_and_serves_other_layers_that_are_alike():
    pieces = pieces_for()
    alike, others = (tuple(Pair(2.0) for _ in range(BLOCK)) for _ in range(2))
    unlike = (*others[1:], Pair(3.0))
    for made, layers in ((0, others), (1, alike), (1, others), (1, unlike)):
        pieces.makes_blocks = layers is alike
        for rows in (12, 1, 5):
            arguments = dict(zip(("hidden_states", "residual"), torch.randn(2, rows, 8), strict=True))
            with torch.no_grad():
                found = pieces.block(Pair.forward, layers, arguments)
                if not made or layers is unlike:
                    assert found is None
                    continue
                wanted = arguments
                for layer in layers:
                    wanted = dict(zip(wanted, layer(**wanted), strict=True))
                torch.testing.assert_close(found, tuple(wanted.values()), atol=1e-5, rtol=1e-5)
        assert pieces.count == made


def test_layers_of_many_kinds_run_eagerly_and_one_line_says_so(said: list[Any]):
    pieces = pieces_for()
    for n in range(7):
        check_as_eager(pieces, Layer(float(n)))
    assert pieces.count == 4
    assert len(said) == 1


def test_what_cannot_be_compiled_runs_eagerly(said: list[Any]):
    class Unclear(Layer):
        def forward(self, hidden_states: Any, residual: Any) -> Any:
            torch._dynamo.graph_break()
            return super().forward(hidden_states, residual)

    pieces = pieces_for()
    for _ in range(2):
        check_as_eager(pieces, Unclear(2.0))
    assert pieces.count == 0
    assert len(said) == 1
