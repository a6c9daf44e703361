"""Requests whose depth a router chooses: the depths and texts of our own engine, in the situations that vLLM makes."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines import engine, generate, own_engine, prompts, reference, runner_of, save_router, save_tiny, set_mode
from skipdecode import Schedule
from skipdecode.engine.adaptive import ROUTER_FILE, Adaptive, bounded
from test_exact import count_hits, count_preemptions
from test_refused import config_of, refusal
from tiny import LAYERS

MODES = ("nested", "where")
PROMPTS = {"full": "full", "split": (0, 1, 2, 3)}
LENGTHS, NEW = [3 + (5 * i) % 37 for i in range(18)], [6 + (7 * i) % 19 for i in range(18)]
ADAPTIVE = {"skipdecode": "adaptive"}


@pytest.fixture(scope="module", params=[*PROMPTS])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("router")
    return folder, *save_router(folder, PROMPTS[request.param])


@pytest.fixture(scope="module")
def served(checkpoint: Any) -> Any:
    with engine(checkpoint[0]) as llm:
        yield llm


def answers(llm: Any, texts: list[list[int]], new: list[int], asked: Any = ADAPTIVE) -> list[tuple[list[int], str]]:
    """Tokens by vLLM, and the depth that it says was chosen; `asked` are the requests' extra arguments."""
    from vllm import SamplingParams

    extras = [asked] * len(texts) if isinstance(asked, dict) else asked
    plain = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    parameters = [SamplingParams(max_tokens=n, extra_args=e, **plain) for n, e in zip(new, extras, strict=True)]
    outputs = llm.generate([{"prompt_token_ids": t} for t in texts], parameters, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), (o.kv_transfer_params or {}).get("skipdecode")) for o in outputs]


@pytest.mark.parametrize("mode", MODES)
def test_depths_and_texts_are_those_of_our_engine_alone_and_in_a_batch(checkpoint: Any, served: Any, mode: str):
    _, model, router = checkpoint
    texts = prompts(LENGTHS, seed=4)
    expected = own_engine(model, Adaptive.choosing(router), texts, NEW)
    assert len({depth for _, depth in expected}) >= 3
    set_mode(served, mode)
    assert answers(served, texts, NEW) == expected
    assert answers(served, texts[::-1], NEW[::-1]) == expected[::-1]
    assert [answers(served, [text], [n])[0] for text, n in zip(texts[:6], NEW, strict=False)] == expected[:6]


def test_beside_requests_that_choose_nothing(checkpoint: Any, served: Any):
    _, model, router = checkpoint
    texts, new = prompts([4 + 3 * i for i in range(12)], seed=5), [20] * 12
    names = ["adaptive", "falling", "full"] * 4
    found = answers(served, texts, new, [{"skipdecode": name} for name in names])
    for text, name, answer in zip(texts, names, found, strict=True):
        if name == "adaptive":
            assert answer == own_engine(model, Adaptive.choosing(router), [text], [20])[0]
        else:
            schedule = Schedule.full(LAYERS) if name == "full" else router.depths[1]
            assert answer == (reference(model, schedule, [text], [20])[0], None)


def test_bounds_of_a_request(checkpoint: Any, served: Any):
    _, model, router = checkpoint
    texts, new = prompts([9, 5, 14, 7, 21, 12], seed=6), [12] * 6
    depths = set()
    for name, value in (("max_loss", 0.0), ("max_loss", 0.5), ("max_loss", 9), ("speedup", 1.0), ("speedup", 1.9)):
        schedule = bounded(Adaptive.choosing(router), **{"speedup": None, "max_loss": None, name: value})
        found = answers(served, texts, new, ADAPTIVE | {f"skipdecode_{name}": value})
        assert found == own_engine(model, schedule, texts, new), (name, value)
        depths.add(tuple(depth for _, depth in found))
    assert len(depths) >= 3


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ({"skipdecode": "confident"}, "unknown schedule 'confident': this server has 'falling', 'full', 'adaptive'"),
        (ADAPTIVE | {"skipdecode_speedup": 7}, "7 is out of the router's reach"),
        (ADAPTIVE | {"skipdecode_speedup": "fast"}, "speedup='fast'"),
        (ADAPTIVE | {"skipdecode_max_loss": -1}, "max_loss=-1"),
        (ADAPTIVE | {"skipdecode_max_loss": 1, "skipdecode_speedup": 1.5}, "not both"),
        ({"skipdecode": "full", "skipdecode_max_loss": 1}, "not of 'full'"),
    ],
)
def test_bounds_that_are_not_accepted(served: Any, asked: dict[str, Any], part: str):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError) as caught:
        answers(served, prompts((5,)), [3], asked)
    assert part in str(caught.value)
    assert not served.llm_engine.has_unfinished_requests()


def test_prompts_found_in_the_prefix_cache(checkpoint: Any, served: Any):
    _, model, router = checkpoint
    texts, new = prompts((70, 41, 33, 96), seed=8), [20] * 4
    hits = count_hits(served)
    for _ in range(2):
        assert answers(served, texts, new) == own_engine(model, Adaptive.choosing(router), texts, new)
    assert sum(hits) >= 32


def test_prompts_in_chunks(checkpoint: Any):
    folder, model, router = checkpoint
    texts, new = prompts((90, 7, 61, 33, 40, 12), seed=2), [15, 25, 9, 30, 11, 20]
    expected = own_engine(model, Adaptive.choosing(router), texts, new)
    waves = {"additional_config": {"skipdecode": {"policy": "waves"}}}
    with engine(folder, max_num_batched_tokens=16, enable_prefix_caching=False, **waves) as llm:
        assert answers(llm, texts, new) == expected


def test_a_preempted_request_keeps_its_depth(checkpoint: Any):
    folder, model, router = checkpoint
    texts, new = prompts([20 + i for i in range(8)], seed=3), [70] * 8
    with engine(folder, num_gpu_blocks_override=14) as llm:
        preempted, choices = count_preemptions(llm), []
        depths = runner_of(llm).skipping.depths
        choose = depths.choose

        def counted(*args: Any) -> Any:
            choices.extend(chosen := choose(*args))
            return chosen

        depths.choose = counted
        assert answers(llm, texts, new) == own_engine(model, Adaptive.choosing(router), texts, new)
    assert preempted
    assert len(choices) == len(set(choices)) == 8


def test_a_router_alone_leaves_full_depth_the_default(tmp_path: Path):
    model, router = save_router(tmp_path, "full", schedule=False)
    texts = prompts((9, 14))
    with engine(tmp_path) as llm:
        assert generate(llm, texts, [9, 9]) == reference(model, Schedule.full(LAYERS), texts, [9, 9])
        assert answers(llm, texts, [9, 9]) == own_engine(model, Adaptive.choosing(router), texts, [9, 9])


def test_without_its_schedule_a_checkpoint_with_a_router_is_stocks(checkpoint: Any):
    assert config_of(checkpoint[0], hf_overrides={"skipdecode": None}).scheduler_config.scheduler_cls is None


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {}], ids=["tied", "untied"])
def test_a_router_of_another_model(tmp_path: Path, changes: dict[str, Any]):
    model, router = save_router(tmp_path, "full", **changes)
    model.save_pretrained(tmp_path, max_shard_size="200KB")  # What is read is in many files.
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    assert config_of(tmp_path).additional_config["skipdecode"]["router"]["model"] == router.model
    save_tiny(tmp_path, router.depths[1], seed=1, **changes)
    for file in tmp_path.glob("model-*"):
        file.unlink()
    assert "the router was made for other weights" in refusal(tmp_path)


def test_routers_that_do_not_fit(checkpoint: Any, tmp_path: Path):
    router = checkpoint[2]
    for wrong, part in (
        (replace(router, model=router.model | {"layers": 30}), "a model with layers 30, this one has 8"),
        (replace(router, model=router.model | {"vocabulary": 7}), "a model with vocabulary 7, this one has 101"),
    ):
        save_router(tmp_path, "full")
        wrong.save(tmp_path / ROUTER_FILE)
        assert part in refusal(tmp_path)
    save_router(tmp_path, "full")
    even = Schedule(LAYERS, (3, 1, 2), (6, 5), name="even").to_dict()
    assert "in another order than 'even'" in refusal(tmp_path, hf_overrides={"skipdecode": even})
    taken = router.depths[1].to_dict() | {"name": "adaptive"}
    assert "'adaptive' is given twice" in refusal(tmp_path, hf_overrides={"skipdecode": taken})
    assert "unknown option 'router'" in refusal(tmp_path, additional_config={"skipdecode": {"router": "x.json"}})
    (tmp_path / ROUTER_FILE).write_text(json.dumps({"kind": "router", "format": 1}))
    assert "skipdecode calibrate --adaptive makes one" in refusal(tmp_path)


def test_a_choice_is_told_where_steps_are_scheduled_ahead():
    """Only a GPU schedules ahead: its output is a promise, with the output proper inside."""
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    from skipdecode.vllm.runner import SkipRunner

    inside = SimpleNamespace()

    class Ahead:
        execute_model_state = requests = None

        def sample_tokens(self, grammar: object) -> Any:
            return SimpleNamespace(_model_runner_output=inside)

    class Runner(SkipRunner, Ahead):
        skipping: Any = SimpleNamespace(depths=SimpleNamespace(choose=lambda *_: {"a": 3}))

    Runner().sample_tokens(None)
    assert inside.skipdecode == {"a": 3}
    assert "output = self._model_runner_output" in inspect.getsource(AsyncGPUModelRunnerOutput.get_output)
