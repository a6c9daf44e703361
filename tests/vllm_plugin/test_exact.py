"""Token for token what transformers gives under the same schedule, in the situations that an engine puts a text in."""

from __future__ import annotations

from typing import Any

import pytest

from engines import engine, generate, paper, prompts, reference, save_tiny
from skipdecode import Schedule
from tiny import LAYERS

MODES = ("nested", "where", "auto")
LENGTHS, NEW = (9, 4, 17, 40, 3, 25), (20, 30, 5, 12, 28, 16)
SCHEDULES = {
    "paper": paper("paper"),
    "even": Schedule.even(LAYERS, (6, 5, 4), name="even"),
    "constant": Schedule.constant(LAYERS, 4, name="constant"),
    "random-nested": Schedule(LAYERS, (4, 1, 6, 3, 5, 2), (8, 7, 7, 4, 4, 3, 2), name="random-nested"),
    "early-termination": Schedule.top_down(LAYERS, (7, 6, 5, 4), name="early-termination"),
    "no-warm-up": paper("no-warm-up", min_exit_layer=2, seq_len=6, warmup_layers=0),
    "shallow-prompt": paper("shallow-prompt", prompt="max_exit"),
}


def options(mode: str, **more: Any) -> dict[str, Any]:
    rest = [s.to_dict() for name, s in SCHEDULES.items() if name != "paper"]
    return {"additional_config": {"skipdecode": {"mode": mode, "schedules": rest}}} | more


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_tiny(folder, SCHEDULES["paper"])


@pytest.fixture(scope="module", params=MODES)
def running(request: pytest.FixtureRequest, checkpoint: Any) -> Any:
    with engine(checkpoint[0], **options(request.param)) as llm:
        yield llm


def test_a_schedule_shows(checkpoint: Any, running: Any):
    texts = prompts(LENGTHS)
    assert generate(running, texts, NEW) != generate(running, texts, NEW, ["full"] * len(texts))


@pytest.mark.parametrize("name", [*SCHEDULES, "full"])
def test_ragged_requests(checkpoint: Any, running: Any, name: str):
    schedule = SCHEDULES.get(name) or Schedule.full(LAYERS)
    texts = prompts(LENGTHS)
    expected = reference(checkpoint[1], schedule, texts, NEW)
    assert generate(running, texts, NEW, [name] * len(texts)) == expected


def test_schedules_mixed_in_one_batch(checkpoint: Any, running: Any):
    names = [*SCHEDULES, "full"]
    texts, new = prompts([11 + 3 * i for i in range(len(names))]), [24] * len(names)
    expected = [
        reference(checkpoint[1], SCHEDULES.get(name) or Schedule.full(LAYERS), [text], [24])[0]
        for name, text in zip(names, texts, strict=True)
    ]
    assert generate(running, texts, new, names) == expected


def test_more_requests_than_slots(checkpoint: Any, running: Any):
    lengths, new = [3 + i % 23 for i in range(40)], [1 + (7 * i) % 33 for i in range(40)]
    texts = prompts(lengths)
    assert generate(running, texts, new) == reference(checkpoint[1], SCHEDULES["paper"], texts, new)


@pytest.mark.parametrize("mode", MODES)
def test_prompts_in_chunks(checkpoint: Any, mode: str):
    texts, new = prompts((90, 7, 61, 33)), (15, 25, 9, 30)
    with engine(checkpoint[0], **options(mode, max_num_batched_tokens=16)) as llm:
        found = generate(llm, texts, new)
    assert found == reference(checkpoint[1], SCHEDULES["paper"], texts, new)


@pytest.mark.parametrize("name", ["paper", "shallow-prompt", "random-nested"])
@pytest.mark.parametrize("mode", MODES)
def test_preempted_texts_are_computed_anew(checkpoint: Any, mode: str, name: str):
    texts, new = prompts([20 + i for i in range(8)]), [70] * 8
    with engine(checkpoint[0], **options(mode, num_gpu_blocks_override=14)) as llm:
        preempted = count_preemptions(llm)
        found = generate(llm, texts, new, [name] * 8)
        assert preempted
    assert found == reference(checkpoint[1], SCHEDULES[name], texts, new)


@pytest.mark.parametrize("mode", MODES)
def test_several_turns_with_the_prefix_cache(checkpoint: Any, mode: str):
    texts, new = prompts((70, 41)), (50, 64)
    with engine(checkpoint[0], **options(mode, enable_prefix_caching=True)) as llm:
        for _ in range(3):
            found = generate(llm, texts, new)
            assert found == reference(checkpoint[1], SCHEDULES["paper"], texts, new)
            again = generate(llm, texts, new)
            assert again == found
            texts = [t + f[:20] + p for t, f, p in zip(texts, found, prompts((5, 9)), strict=True)]
        assert cached_blocks(llm) > 0


def test_prompts_of_different_depth_share_nothing(checkpoint: Any):
    texts = prompts((70,)) * 3
    with engine(checkpoint[0], **options("nested", enable_prefix_caching=True, max_num_seqs=1)) as llm:
        for name in ("paper", "shallow-prompt", "paper", "shallow-prompt"):
            expected = reference(checkpoint[1], SCHEDULES[name], texts[:1], [30])
            assert generate(llm, texts[:1], [30], [name]) == expected


def test_a_preempted_text_does_not_take_its_own_words_from_another_prompt(checkpoint: Any):
    """The answer of one text is the prompt of another, which publishes it at full depth."""
    first = prompts((40,))
    answer = reference(checkpoint[1], SCHEDULES["paper"], first, [70])[0]
    texts = [first[0], first[0] + answer[:60], *prompts([30] * 6)]
    new = [90, 60, *[70] * 6]
    with engine(checkpoint[0], **options("nested", enable_prefix_caching=True, num_gpu_blocks_override=14)) as llm:
        preempted = count_preemptions(llm)
        found = generate(llm, texts, new)
        assert preempted
    assert found == reference(checkpoint[1], SCHEDULES["paper"], texts, new)


def test_aborted_requests_leave_the_others_alone(checkpoint: Any, running: Any):
    from vllm import SamplingParams

    texts, new = prompts((12, 9, 30, 8)), (40, 40, 40, 40)
    core = running.llm_engine
    for number, text in enumerate(texts):
        parameters = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        core.add_request(str(number), {"prompt_token_ids": text}, parameters)
    done: dict[str, list[int]] = {}
    for step in range(60):
        if step == 10:
            core.abort_request(["1"])
        done |= {o.request_id: list(o.outputs[0].token_ids) for o in core.step() if o.finished}
        if not core.has_unfinished_requests():
            break
    expected = reference(checkpoint[1], SCHEDULES["paper"], texts, new)
    assert done.pop("1", None) in (None, expected[1][: len(done.get("1", []))])
    assert done == {str(i): expected[i] for i in (0, 2, 3)}


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def count_preemptions(llm: Any) -> list[str]:
    scheduler, seen = scheduler_of(llm), []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *a, **k: (seen.append(request.request_id), preempt(request, *a, **k))[1]
    return seen


def cached_blocks(llm: Any) -> int:
    return len(scheduler_of(llm).kv_cache_manager.block_pool.cached_block_hash_to_block)
