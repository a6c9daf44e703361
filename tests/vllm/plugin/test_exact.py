"""Token for token what transformers gives under the same schedule, in the situations that an engine puts a text in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engines import (
    compiled_graphs,
    count_preemptions,
    engine,
    generate,
    paper,
    pieces_of,
    prompts,
    reference,
    runner_of,
    save_tiny,
    scheduler_of,
)
from skipdecode import Schedule
from skipdecode.errors import UnsupportedFeatureError
from skipdecode.schedule.order import top_down
from skipdecode.vllm.step_rows import LayerLimits, StepBatch
from tiny import LAYERS

LENGTHS, NEW = (9, 4, 17, 40, 3, 25), (20, 30, 5, 12, 28, 16)
SCHEDULES = {
    "paper": paper("paper"),
    "even": Schedule.even(LAYERS, (6, 5, 4), name="even"),
    "constant": Schedule.constant(LAYERS, 4, name="constant"),
    "random-nested": Schedule(LAYERS, (4, 1, 6, 3, 5, 2), (8, 7, 7, 4, 4, 3, 2), name="random-nested"),
    "early-termination": Schedule(LAYERS, top_down(LAYERS, 1), (7, 6, 5, 4), name="early-termination"),
    "no-warm-up": paper("no-warm-up", min_exit_layer=2, seq_len=6, warmup_layers=0),
    "shallow-prompt": paper("shallow-prompt", prompt="max_exit"),
    "split": Schedule.split(LAYERS, 4, (6, 5, 3), name="split"),
    "scattered": Schedule(LAYERS, (1, 2, 4, 3), (6, 5, 4), 1, (0, 2, 5), name="scattered"),
}


def options(**more: Any) -> dict[str, Any]:
    rest = [s.to_dict() for name, s in SCHEDULES.items() if name != "paper"]
    return {"additional_config": {"skipdecode": {"schedules": rest}}} | more


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_tiny(folder, SCHEDULES["paper"])


@pytest.fixture(scope="module", params=["eager", "compiled"])
def one_engine(checkpoint: Any, request: pytest.FixtureRequest) -> Any:
    with engine(checkpoint[0], **options(enforce_eager=request.param == "eager")) as llm:
        assert pieces_of(llm).eager == (request.param == "eager")
        graphs = compiled_graphs()
        yield llm
        assert compiled_graphs() == graphs


@pytest.mark.parametrize("name", [*SCHEDULES, "full"])
def test_ragged_requests(checkpoint: Any, one_engine: Any, name: str):
    schedule = SCHEDULES.get(name) or Schedule.full(LAYERS)
    texts = prompts(LENGTHS)
    expected = reference(checkpoint[1], schedule, texts, NEW)
    assert generate(one_engine, texts, NEW, [name] * len(texts)) == expected


def test_schedules_mixed_in_one_batch(checkpoint: Any, one_engine: Any):
    names = [*SCHEDULES, "full"]
    texts, new = prompts([11 + 3 * i for i in range(len(names))]), [24] * len(names)
    expected = [
        reference(checkpoint[1], SCHEDULES.get(name) or Schedule.full(LAYERS), [text], [24])[0]
        for name, text in zip(names, texts, strict=True)
    ]
    assert generate(one_engine, texts, new, names) == expected


def test_more_requests_than_slots(checkpoint: Any, one_engine: Any):
    lengths, new = [3 + i % 23 for i in range(40)], [1 + (7 * i) % 33 for i in range(40)]
    texts = prompts(lengths)
    assert generate(one_engine, texts, new) == reference(checkpoint[1], SCHEDULES["paper"], texts, new)


def test_prompts_in_chunks(checkpoint: Any):
    texts, new = prompts((90, 7, 61, 33)), (15, 25, 9, 30)
    with engine(checkpoint[0], **options(max_num_batched_tokens=16, enable_prefix_caching=False)) as llm:
        for name in ("paper", "split", "scattered"):
            expected = reference(checkpoint[1], SCHEDULES[name], texts, new)
            assert generate(llm, texts, new, [name] * 4) == expected, name


@pytest.fixture(scope="module")
def little_memory(checkpoint: Any) -> Any:
    with engine(checkpoint[0], **options(num_gpu_blocks_override=14, enable_prefix_caching=True)) as llm:
        yield llm


@pytest.mark.parametrize("name", ["paper", "shallow-prompt", "random-nested", "split"])
def test_preempted_texts_are_computed_anew(checkpoint: Any, little_memory: Any, name: str):
    texts, new = prompts([20 + i for i in range(8)]), [70] * 8
    preempted = count_preemptions(little_memory)
    assert generate(little_memory, texts, new, [name] * 8) == reference(checkpoint[1], SCHEDULES[name], texts, new)
    assert preempted


@pytest.mark.parametrize("name", ["paper", "split"])
def test_several_turns_with_the_prefix_cache(checkpoint: Any, one_engine: Any, name: str):
    texts, new = prompts((70, 41), seed=1 + len(name)), (50, 64)
    hits = count_hits(one_engine)
    for _ in range(3):
        found = generate(one_engine, texts, new, [name] * 2)
        assert found == reference(checkpoint[1], SCHEDULES[name], texts, new)
        assert generate(one_engine, texts, new, [name] * 2) == found
        texts = [t + f[:20] + p for t, f, p in zip(texts, found, prompts((5, 9)), strict=True)]
    assert sum(hits) >= 32


def test_prompts_of_different_depth_share_nothing(checkpoint: Any, one_engine: Any):
    texts = prompts((70,), seed=7)
    for name in ("paper", "shallow-prompt", "split", "paper", "shallow-prompt", "split"):
        assert generate(one_engine, texts, [30], [name]) == reference(checkpoint[1], SCHEDULES[name], texts, [30])


def test_a_prompt_that_ends_where_anothers_block_does(checkpoint: Any, one_engine: Any):
    """The last token of a prompt runs layers that a longer prompt projects there: they may not share its block."""
    long = prompts((100,), seed=11)[0]
    for length in (64, 96, 100, 65, 64):
        text = [long[:length]]
        expected = reference(checkpoint[1], SCHEDULES["split"], text, [40])
        assert generate(one_engine, text, [40], ["split"]) == expected, length


def test_a_text_looks_up_no_further_than_its_prompt(checkpoint: Any, one_engine: Any):
    """Another's prompt holds this one's answer at full depth: a preempted text may not take its words from there."""
    from vllm import SamplingParams

    prompt = prompts((40,), seed=9)[0]
    answer = reference(checkpoint[1], SCHEDULES["paper"], [prompt], [70])[0]
    generate(one_engine, [prompt + answer], [1])
    scheduler, core = scheduler_of(one_engine), one_engine.llm_engine
    core.add_request("again", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=99, detokenize=False))
    request = next(iter(scheduler.requests.values()))
    request.append_output_token_ids(answer)
    found = scheduler.kv_cache_manager.coordinator
    assert type(found).find_longest_cache_hit(found, request.block_hashes, request.num_tokens - 1)[1] == 96
    assert scheduler.kv_cache_manager.get_computed_blocks(request)[1] == 32
    core.abort_request([request.request_id], internal=True)


def test_aborted_requests_leave_the_others_alone(checkpoint: Any, one_engine: Any):
    from vllm import SamplingParams

    texts, new = prompts((12, 9, 30, 8)), (40, 40, 40, 40)
    core = one_engine.llm_engine
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
    assert not core.has_unfinished_requests()
    expected = reference(checkpoint[1], SCHEDULES["paper"], texts, new)
    assert {n: t for n, t in done.items() if n != "1"} == {str(i): expected[i] for i in (0, 2, 3)}


def test_an_unknown_schedule_is_refused_at_admission(one_engine: Any):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=r"^unknown schedule 'fast': this server has 'paper', 'even', "):
        generate(one_engine, prompts((5,)), [3], ["fast"])
    assert not one_engine.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_graph_of_every_layer_is_never_replayed_in_a_step_that_skips(one_engine: Any, mode: str):
    """Should a vLLM ask elsewhere which graph to take, the step is refused."""
    from vllm.config import CUDAGraphMode

    skipping = runner_of(one_engine).skipping
    skipping.step = LayerLimits([SCHEDULES["constant"]]).step(StepBatch(*np.array([[9], [1], [4], [0]])))
    assert skipping.step is not None
    context = SimpleNamespace(attn_metadata={"layer": None}, cudagraph_runtime_mode=CUDAGraphMode[mode])
    with pytest.raises(UnsupportedFeatureError):
        skipping.begin(context)


def test_waves_admit_together(checkpoint: Any):
    texts, new = prompts([6 + i for i in range(16)]), [30] * 16
    expected = reference(checkpoint[1], SCHEDULES["paper"], texts, new)
    with engine(checkpoint[0], additional_config={"skipdecode": {"policy": "refill"}}, max_num_seqs=4) as llm:
        starts: list[int] = []
        scheduler = scheduler_of(llm)
        schedule = scheduler.schedule

        def seen(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            if output.scheduled_new_reqs:
                starts.append(len(output.scheduled_new_reqs))
            return output

        scheduler.schedule = seen
        assert generate(llm, texts, new) == expected
    assert starts == [4, 4, 4, 4]


def count_hits(llm: Any) -> list[int]:
    manager, seen = scheduler_of(llm).kv_cache_manager, []
    look_up = manager.get_computed_blocks

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        found = look_up(request, *args, **kwargs)
        seen.append(found[1])
        return found

    manager.get_computed_blocks = counted
    return seen
