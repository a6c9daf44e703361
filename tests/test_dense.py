"""The GPU's way of decoding, on a CPU: steps of fixed shape over a static KV cache, with tapes for CUDA graphs.

A tape holds a step's operators as they were called the first time, and repeats them: what Python worked out then (a
length, a list of rows) stays as it was, as in a CUDA graph. Operators that a capture refuses are refused here too.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from engine_tools import decode
from skipdecode import Schedule, attach
from skipdecode.engine import FastEngine, Request
from skipdecode.engine.fast_model import DenseModel, open_model
from skipdecode.engine.feeds import TokenRows
from skipdecode.engine.kernels import graphs
from skipdecode.engine.kernels.static_cache import row_bucket, token_bucket
from skipdecode.engine.model_spec import READERS
from skipdecode.engine.opening import EngineSource
from skipdecode.errors import UsageError
from skipdecode.performance.bench.measure import measure
from skipdecode.performance.bench.peers import Rows
from skipdecode.performance.bench.peers.own import FastPeer
from skipdecode.performance.bench.profile import profile
from skipdecode.performance.bench.workload import Workload
from skipdecode.performance.measure import CostMeter
from tiny import LAYERS, VOCAB, tiny_model

NEW = 12
PROMPTS = [(5, 6, 7, 8), (9,), tuple(range(3, 40)), (11, 12, 13, 14, 15, 16, 17)]
LINEAR = Schedule.from_speedup(LAYERS, 2, NEW)
# They read a value back, or make a tensor of numbers on the host: a capture fails on the first and bakes in the other.
REFUSED = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "unique")


class Tape(TorchDispatchMode):
    """Notes operators, in order, and repeats them on what they then find in the tensors that stayed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in func.name() for name in REFUSED), func.name()
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        made: dict[int, Tensor] = {}
        for func, args, kwargs, out in self.calls:
            args, kwargs = tree_map(lambda x: made.get(id(x), x) if isinstance(x, Tensor) else x, (args, kwargs))
            again = func(*args, **kwargs)
            for before, now in zip(tree_flatten(out)[0], tree_flatten(again)[0], strict=True):
                if isinstance(before, Tensor) and id(before) not in made:
                    assert before.shape == now.shape
                    made[id(before)] = now


class TapeCapture:
    replays = 0

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        step()  # as a GPU's does: the first run does the work, the recorded one must be able to come on top
        with Tape() as tape:
            step()

        def replay() -> None:
            TapeCapture.replays += 1
            tape.replay()

        return replay


def taped(family: str, **changes: Any) -> DenseModel:
    return DenseModel(tiny_model(family, **changes), TapeCapture)


def tokens(engine: FastEngine, requests: list[Request]) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    for out in engine.run(requests):
        rows.setdefault(out.request, []).append(out.token)
    return [rows[number] for number in sorted(rows)]


def requests_of(new: int = NEW) -> list[Request]:
    return [Request(p, new) for p in PROMPTS]


@pytest.mark.parametrize("family", sorted(READERS))
def test_recorded_steps_give_the_tokens_of_generate_under_attach(family: str):
    model, before = tiny_model(family, seed=3), TapeCapture.replays
    got = tokens(FastEngine(DenseModel(model, TapeCapture), LINEAR), requests_of())
    assert TapeCapture.replays > before
    with attach(model, LINEAR):
        for prompt, row in zip(PROMPTS, got, strict=True):
            ids = torch.tensor([prompt])
            assert row == model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("prompt", ["max_exit", (0, 1, 3)], ids=str)
@pytest.mark.parametrize("family", ["llama", "opt", "mistral", "gemma3_text"])
def test_rows_of_all_ages_and_lengths_come_go_and_move(family: str, prompt: Any):
    schedule = Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=7, seq_len=6, prompt=prompt)
    requests = [Request(PROMPTS[i % 4], 3 + 5 * i % 17) for i in range(11)]
    alone = [tokens(FastEngine(taped(family), schedule), [r])[0] for r in requests]
    run = FastEngine(taped(family), schedule, max_rows=6, join_below=1, prompt_tokens=16)
    assert tokens(run, requests) == alone


def test_a_waves_tail_costs_what_is_alive():
    run = FastEngine(taped("llama"), LINEAR, max_rows=8)
    slots = run.submit([Request(PROMPTS[0], 12 if i == 0 else 4) for i in range(8)])
    run.step()
    assert run.kv.bytes_held == 8 * LAYERS * run.kv.cache.capacity * run.kv.token_bytes
    covered = []
    while run.has_work:
        run.step()
        covered.append(run.kv.close_ranks())
    assert len(slots) == 8
    assert covered[0] == 8
    assert covered[-2] == 1


def test_a_static_cache_serves_one_engine_after_another_with_its_graphs():
    model = taped("llama")
    first = tokens(FastEngine(model, LINEAR), requests_of())
    gc.collect()
    before = TapeCapture.replays
    run = FastEngine(model, LINEAR)
    cache, captured = run.kv.cache, len(run.kv.cache.graphs)
    assert captured
    steps_of_other = FastEngine(model, LINEAR)
    assert steps_of_other.kv.cache is not cache
    assert tokens(run, requests_of()) == first
    assert len(cache.graphs) == captured
    assert TapeCapture.replays - before == run.stats.steps
    # More room than there is: what was recorded on the old memory goes, and the tokens stay.
    longer = [*requests_of(), Request(PROMPTS[1], 200)]
    assert tokens(run, longer)[: len(first)] == first
    assert cache.capacity > 200


def test_rows_that_run_keep_their_tokens_while_the_cache_grows_and_positions_are_made():
    model = taped("llama", max_position_embeddings=8192)
    alone = tokens(FastEngine(model, LINEAR), [Request(PROMPTS[2], 30)])
    run = FastEngine(model, LINEAR, max_rows=4, join_below=1, in_order=True)
    run.submit([Request(PROMPTS[2], 30)])
    got = [out.token for _ in range(4) for out in run.step()]
    run.submit([Request(tuple(3 + i % 90 for i in range(2100)), 2)])
    got += [out.token for out in run.run([]) if out.request == 0]
    assert [got] == alone


def test_a_dead_rows_infinities_reach_nobody():
    model = taped("opt")
    want = tokens(FastEngine(model, LINEAR), requests_of())
    gc.collect()
    run = FastEngine(model, LINEAR)
    run.kv.cache.kv.fill_(torch.inf)
    assert tokens(run, requests_of()) == want


def test_beyond_the_most_graphs_steps_run_as_they_are(monkeypatch: Any):
    want = tokens(FastEngine(taped("qwen2"), LINEAR), requests_of())
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)
    run = FastEngine(taped("qwen2"), LINEAR)
    assert tokens(run, requests_of()) == want
    assert len(run.kv.cache.graphs) == 1


def test_few_depths_for_a_job_and_no_fewer_layers():
    model = tiny_model("llama")
    asked = Schedule(LAYERS, (4, 1, 6, 3, 5, 2), (8, *[7] * 60, *[4] * 60, 3), name="random-nested")
    notes: list[str] = []
    engine = EngineSource(model, DenseModel(copy.deepcopy(model)), notes.append).engine(asked)
    assert engine.schedule.budgets == (8, *[7] * 60, *[4] * 61)
    assert "different depths" in notes[0]
    plain = EngineSource(model, open_model(model, "auto"), notes.append).engine(asked)
    assert decode(engine, PROMPTS, 20) == decode(plain, PROMPTS, 20)
    assert engine.stats.kv_bytes_peak == engine.stats.kv_bytes_full_peak > 0


def test_the_bench_times_recorded_steps_only_and_profiles_them():
    model = taped("opt")
    peer = FastPeer(model._model, model)
    workload = Workload((1, 3), (6,), 9, (2.0,), 1)
    rows = measure([peer], workload, LAYERS, torch.device("cpu"))["rows"]
    assert [(r["batch"], r["nominal_speedup"]) for r in rows] == [(1, 1), (1, 2), (3, 1), (3, 2)]
    (cache,) = model._users
    recorded = len(cache.graphs)
    peer.decode_seconds(Schedule.full(LAYERS), Rows(3, 6, 9))
    assert len(cache.graphs) == recorded
    kinds = {r["kind"] for r in profile([peer], workload, LAYERS, 1e9)["rows"]}
    assert {"layer", "sampling", "host"} <= kinds


def test_costs_are_probed_like_those_of_other_models():
    model = taped("llama", max_position_embeddings=1024)
    meter = CostMeter(model._model, model, rows=(1, 3))
    meter.run(1, 0.05)
    assert (meter.cost().num_layers, meter.cost().max_rows) == (LAYERS, 3)


@pytest.mark.parametrize("family", sorted(READERS))
def test_forwards_stay_on_the_device(family: str):
    """Where no number can be read back, and tensors of the host do not mix with those of the device."""
    model = DenseModel(tiny_model(family).to("meta"))
    kv = model.new_kv()
    kv.reserve(3, 40, 0)
    slots = [kv.open() for _ in range(3)]
    prompts = TokenRows([5, 6, 7, 8, 9], [slots[0]] * 3 + [slots[1]] * 2, [0, 1, 2, 4, 5], [5] * LAYERS, [2, 4])
    step = TokenRows([5, 6], slots[:0:-1], [3, 30], [2, *[1] * (LAYERS - 1)], [0, 1])
    for rows in (prompts, step):
        logits = model.forward(rows, kv)
        assert (logits.device.type, *logits.shape) == ("meta", 2, VOCAB)


def test_sizes_of_steps():
    assert [row_bucket(n) for n in (1, 2, 3, 4, 5, 64, 65, 128)] == [1, 2, 4, 4, 8, 64, 128, 128]
    assert [token_bucket(n) for n in (1, 64, 65, 1000, 1025, 2049)] == [64, 64, 128, 1024, 1152, 2304]
    for n in range(1, 9000, 7):
        assert n <= token_bucket(n) < max(n + 64, 1.13 * n)
        assert token_bucket(token_bucket(n)) == token_bucket(n)


def test_what_it_cannot_do_is_refused():
    model = tiny_model("llama")
    with pytest.raises(UsageError, match="lower max_rows"):
        FastEngine(model, LINEAR, kernel="dense", kv_bytes=10**9)
    with pytest.raises(UsageError, match="int8 weights are read on CPUs only"):
        open_model(model, "dense", "int8")
    run = FastEngine(model, LINEAR, kernel="dense")
    with pytest.raises(UsageError, match=f"token {VOCAB} "):
        run.submit([Request((VOCAB,), 20)])
