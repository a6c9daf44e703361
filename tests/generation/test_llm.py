"""`skipdecode.LLM`: what the command line and transformers say, from Python, in batches and as streams."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

import skipdecode
from checkpoints import save_checkpoint
from engine_tools import always_drafts
from skipdecode import LLM, Schedule
from skipdecode.cli import main
from skipdecode.data.prompts import EncodedPrompt
from skipdecode.engine import FastEngine, Sampling
from skipdecode.errors import (
    DataError,
    GrammarError,
    ModelLoadError,
    OptionError,
    ScheduleError,
    SkipDecodeError,
    UntunedScheduleWarning,
    UsageError,
)
from skipdecode.generation.decoding import Decoding
from textgen_tools import CONTEXT, read_rows, save_tiny_model, write_rows
from tiny import LAYERS

TEXTS = ["hello", "hello you", "a", "what is it that you want"]
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(model_dir: str) -> LLM:
    return LLM(model_dir, device="cpu")


def texts(outputs: Any) -> list[str]:
    return [out.text for out in outputs]


# ---------------------------------------------------------------------- batches


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_texts_are_those_without_drafts(
    llm: LLM, model_dir: str, tmp_path: Path, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    always_drafts(monkeypatch)
    full = texts(llm.generate(TEXTS, 24, schedule="2x", exact=False, **sampling))
    for _ in range(2):  # the second time from earlier answers
        assert texts(llm.generate(TEXTS, 24, schedule="2x", **sampling)) == full
    stream = llm.stream(TEXTS[1], 24, schedule="2x", stop=[full[1][3:5]], **{**sampling, "temperature": 0})
    assert "".join(stream) == stream.text
    out = str(tmp_path / "out.jsonl")
    command = ["generate", model_dir, *TEXTS, "--output", out, "--max-new-tokens", "24", "--schedule", "2x"]
    given = ["--temperature", "0.8", "--seed", "3"] if sampling else []
    assert main([*command, *given, "--batch-size", "2", "--compare"]) == 0
    assert [row["text"] for row in read_rows(out)] == full


def test_texts_fit_a_json_schema(llm: LLM, model_dir: str, tmp_path: Path):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    expected = texts(llm.generate(TEXTS, 40, json_schema=schema, schedule="2x"))
    assert {json.loads(text)["a"] for text in expected} <= {1, 2}
    assert "".join(llm.stream(TEXTS[0], 40, json_schema=json.dumps(schema), schedule="2x")) == expected[0]
    file, out = tmp_path / "schema.json", tmp_path / "out.jsonl"
    file.write_text(json.dumps(schema))
    data = write_rows(tmp_path / "in.jsonl", [{"prompt": p} for p in TEXTS])
    command = ["generate", model_dir, "--input", data, "--output", str(out), "--schedule", "2x", "--seq-len", "40"]
    assert main([*command, "--max-new-tokens", "40", "--json-schema", str(file)]) == 0
    assert [row["text"] for row in read_rows(out)] == expected
    file.write_text('{"items": {"not": {}}}')
    assert main([*command, "--json-schema", str(file), "--overwrite"]) == 2
    with pytest.raises(GrammarError) as refused:
        llm.generate("hello", json_schema=json.loads(file.read_text()))
    assert refused.value.path == "/items"


def test_a_prompt_is_a_text_a_chat_or_a_record(llm: LLM):
    prompts = ["hi", CHAT, {"prompt": "hi"}, {"messages": CHAT}, {"question": "hi"}]
    found = llm.generate(prompts, 4)
    assert [out.prompt for out in found] == ["<user>hi<assistant>"] * 5
    assert len({out.text for out in found}) == 1
    plain = [out.prompt for out in llm.generate(prompts, 4, template=False)]
    assert plain == ["hi", "<user>hi<assistant>", "hi", "<user>hi<assistant>", "hi"]
    assert [out.prompt for out in llm.generate(CHAT, 4)] == ["<user>hi<assistant>"]
    assert [out.prompt for out in llm.generate({"text": "hi"}, 4, template="{text}!")] == ["hi!"]
    assert llm.generate([], 4) == []
    assert llm.generate(iter(["hi"]), 4) == llm.generate(("hi",), 4) == found[:1]


def test_a_chat_may_have_calls_and_names(llm: LLM, capsys: Any):
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    chat = [*CHAT, {"role": "assistant", "tool_calls": [call]}, {"role": "user", "name": "Ann", "content": "you"}]
    for prompts in (chat, [chat], {"messages": chat}):
        assert [out.prompt for out in llm.generate(prompts, 1)] == ["<user>hi<assistant><user>you<assistant>"]
    told = capsys.readouterr().err
    assert (told.count("'name'"), told.count("'tool_calls'")) == (1, 1)


def test_a_chat_is_answered_whole_or_in_pieces(llm: LLM):
    answer = llm.chat(CHAT, 8, schedule="2x")
    assert [answer] == llm.generate([CHAT], 8, schedule="2x")
    assert "".join(llm.chat(CHAT, 8, schedule="2x", stream=True)) == answer.text
    for wrong in ("hi", {"role": "user", "content": "hi"}):
        with pytest.raises(OptionError, match="messages"):
            llm.chat(wrong, 8)


def test_a_stop_text_that_the_last_allowed_token_completes_is_a_stop(llm: LLM):
    end = llm.generate("hello", 12)[0].text[3:5]
    (cut,) = llm.generate("hello", 12, stop=end)
    assert llm.generate("hello", len(cut.tokens), stop=end) == [cut]
    stream = llm.stream("hello", len(cut.tokens), stop=end)
    assert ("".join(stream), stream.finish_reason) == (cut.text, "stop")


def test_a_stop_text_that_is_a_special_token_is_that_token(llm: LLM):
    options = {"stop": ["never", "<s>"], "logit_bias": {1: 100}}
    (out,) = llm.generate("hello", 12, **options)
    assert (out.text, out.tokens, out.finish_reason) == ("", [1], "stop")
    stream = llm.stream("hello", 12, **options)
    assert ("".join(stream), stream.tokens, stream.finish_reason) == ("", [1], "stop")


def test_statistics_say_layers_memory_and_time(llm: LLM):
    llm = LLM(llm.loaded)
    schedule = Schedule.from_speedup(LAYERS, 2, 9)
    outputs = llm.generate(TEXTS, 9, schedule=schedule, template=False)
    stats = outputs.stats
    assert llm.stats is stats
    assert stats.mean_layers == pytest.approx(schedule.mean_budget(8))
    assert (stats.rows, stats.new_tokens) == (len(TEXTS), 9 * len(TEXTS))
    assert stats.prompt_tokens == sum(map(len, TEXTS))
    assert 0 < stats.kv_saved < 1
    assert 0 < stats.prompt_seconds + stats.decode_seconds <= stats.seconds
    assert stats.tokens_per_s > 0
    assert llm.generate("hello", 9, schedule="full").stats.mean_layers == LAYERS
    assert "layers for a token" in str(stats)
    assert "first token" not in str(stats)


def test_outputs_come_as_they_end_from_prompts_that_are_read_as_they_are_needed(llm: LLM):
    llm, texts_given = LLM(llm.loaded, max_rows=2), [*TEXTS, "y" * CONTEXT, *TEXTS]
    expected = llm.generate(TEXTS, 8, schedule="2x")
    decoding, taken = Decoding(sampling=Sampling(), max_new_tokens=8), list[EncodedPrompt]()

    def prompts() -> Iterator[EncodedPrompt]:
        for prompt in llm.encode(texts_given):
            taken.append(prompt)
            yield prompt

    outputs = llm.iterate(prompts(), decoding, llm.schedule_of("2x", 8), window=3)
    found = [next(outputs)]
    assert len(taken) == 3
    assert llm.generate(TEXTS, 8, schedule="2x") == expected  # nobody waits between two outputs
    found += outputs
    assert {output.index: output.text for output in found if output.error is None} == {
        index: expected[index % 5].text for index in range(9) if index != 4
    }
    (bad,) = (output for output in found if output.error is not None)
    assert (bad.index, bad.source.record, bad.finish_reason) == (4, taken[4].record, None)
    assert (bad.text, bad.tokens) == ("", [])
    assert found.index(bad) < len(found) - 1


# ---------------------------------------------------------------------- streams


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}, {"stop": ("e", "zz")}])
def test_a_stream_is_the_text_of_generate_in_pieces(llm: LLM, sampling: dict[str, Any]):
    (whole,) = llm.generate("hello", 12, schedule="2x", **sampling)
    stream = llm.stream("hello", 12, schedule="2x", **sampling)
    pieces = list(stream)
    assert "".join(pieces) == stream.text == whole.text
    assert all(pieces)
    assert (stream.tokens, stream.finish_reason) == (whole.tokens, whole.finish_reason)
    assert stream.stats is not None
    assert stream.stats.new_tokens == len(whole.tokens)
    assert len(pieces) > 1 or whole.finish_reason == "stop"


@pytest.mark.parametrize("engine", ["fast", "transformers"])
def test_streams_may_take_turns_and_be_left(model_dir: str, llm: LLM, engine: str):
    alone, other = texts(llm.generate(["hello", "you"], 8, schedule="2x")), LLM(model_dir, engine=engine)
    pieces = zip_longest(*(other.stream(text, 8, schedule="2x") for text in ("hello", "you")), fillvalue="")
    started = next(pieces)
    assert texts(other.generate(["hello", "you"], 8, schedule="2x")) == alone  # beside streams that were left half way
    assert ["".join(p) for p in zip(started, *pieces, strict=True)] == alone
    left = other.stream("hello", 30)
    next(left)
    left.close()
    assert left.finish_reason is None
    assert left.stats is not None
    assert list(left) == []
    assert texts(other.generate(["hello", "you"], 8, schedule="2x")) == alone


def test_calls_of_all_schedules_share_what_is_kept_of_prompts(llm: LLM):
    llm, prompt = LLM(llm.loaded), "what is it that you want"
    for number, schedule in enumerate(("full", "2x", Schedule(LAYERS, (3, 5), (LAYERS - 2,)))):
        assert (llm.generate(prompt, 4, schedule=schedule).stats.prefix_hit_tokens > 0) == (number > 0)
    streams = [llm.stream(prompt, 8, schedule="2x") for _ in range(3)]
    assert len({"".join(stream) for stream in streams}) == 1
    assert llm.generate(prompt, 4).stats.prefix_hit_tokens > 0


def test_an_engine_that_failed_in_a_stream_is_not_used_again(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    llm = LLM(llm.loaded)
    before = llm.generate("hello", 4)
    stream = llm.stream("hello", 8)
    with monkeypatch.context() as patched:
        patched.setattr(FastEngine, "step", lambda engine: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(stream)
    again = llm.generate("hello", 4)
    assert (again, again.stats.prefix_hit_tokens) == (before, 0)


def test_an_interrupted_call_leaves_no_rows_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    before = texts(llm.generate(TEXTS, 6))
    step, calls = FastEngine.step, []

    def interrupted(engine: FastEngine) -> Any:
        calls.append(engine)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(engine)

    with monkeypatch.context() as patched:
        patched.setattr(FastEngine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS, 6)
    assert not any(engine.has_work for engine in calls)
    assert texts(llm.generate(TEXTS, 6)) == before


# ---------------------------------------------------------------------- schedules


def test_a_schedule_is_named_in_many_ways(model_dir: str, tmp_path: Path):
    own, file = Schedule.from_speedup(LAYERS, 2, 16), tmp_path / "own.json"
    own.save(file)
    llm = LLM(model_dir, device="cpu", schedule=str(file))
    assert llm.schedule_of(None) == llm.schedule_of(own) == llm.schedule_of(str(file)) == llm.schedule_of(file) == own
    assert llm.schedule_of("3x", 20) == Schedule.from_speedup(LAYERS, 3, 20)
    assert llm.schedule_of("1x").is_full
    assert list(llm.schedules) == ["full"]
    for wrong in ("fast", 2, "0.5x", "9x", Schedule.full(LAYERS + 1), str(tmp_path)):
        with pytest.raises(ScheduleError):
            llm.schedule_of(wrong)
        with pytest.raises(ScheduleError):
            LLM(llm.loaded, wrong)


def test_a_checkpoints_own_schedule_is_the_default(tmp_path: Path):
    own = Schedule.even(LAYERS, (6, 5, 4))
    llm = LLM(save_tiny_model(tmp_path, skipdecode=own.to_dict()), device="cpu")
    assert llm.schedules == {"full": Schedule.full(LAYERS), own.name: own}
    assert llm.generate("hello", 6).stats.mean_layers == pytest.approx(own.mean_budget(5))
    assert llm.schedule_of("2x").drop_order == own.drop_order
    full, skipping = llm.generate("hello", 6, schedule="full"), llm.generate("hello", 6)
    assert full[0].tokens != skipping[0].tokens
    assert texts(LLM(llm.loaded, "full").generate("hello", 6)) == texts(full)


def test_a_schedule_that_the_weights_do_not_know_is_warned_of_once(llm: LLM):
    fresh = LLM(llm.loaded)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UntunedScheduleWarning)
        for schedule in ("2x", "2x", "full"):
            fresh.generate("hello", 4, schedule=schedule)
    assert [warning.filename for warning in told] == [__file__]


# ---------------------------------------------------------------------- what cannot be done


@pytest.mark.parametrize("bad", ["", "y" * CONTEXT, 7, None, {"other": "x"}, [{"role": "user"}], ["a", "b"]])
def test_a_bad_prompt_is_named_by_its_place(llm: LLM, bad: Any):
    with pytest.raises(DataError) as error:
        llm.generate(["hello", bad, "you"], 4)
    assert error.value.index == 1
    with pytest.raises(DataError) as error:
        llm.stream(bad, 4)
    assert error.value.index == 0


def test_wrong_values_name_the_field(llm: LLM):
    for options, field in (({"max_new_tokens": 0}, "max_new_tokens"), ({"temperature": -1}, "temperature")):
        with pytest.raises(OptionError) as error:
            llm.generate("hello", **options)
        assert error.value.name == field
    biases = ({99999: 5}, {-1: 5}, {"5": 5}, {5: float("nan")}, {5: None}, [5])
    stops = ([""], "", 5, [None], [b"x"])
    for options in ({"top_k": 3}, *({"logit_bias": bias} for bias in biases), *({"stop": stop} for stop in stops)):
        with pytest.raises(UsageError, match=r"top_k|logit_bias|vocabulary|stop"):
            llm.generate("hello", **options)
        with pytest.raises(UsageError):
            next(llm.stream("hello", **options))
    for name in ("x" * 10_000, "\0", "1e999x", "9" * 400 + "x"):
        with pytest.raises(ScheduleError):
            llm.generate("hello", schedule=name)
    for name, meant in (("temprature", "temperature"), ("max_tokens", "max_new_tokens"), ("top_logprobs", "serve")):
        with pytest.raises(UsageError, match=f"{name}.*{meant}"):
            llm.generate("hello", **{name: 1})


REFUSED: dict[str, Callable[[LLM], Any]] = {
    **{f"generate {given}": lambda llm, given=given: llm.generate("hello", **given) for given in (
        {"max_tokens": 8}, {"max_new_tokens": "5"}, {"max_new_tokens": None}, {"max_new_tokens": 5.0},
        {"max_new_tokens": True}, {"logit_bias": {True: 1.0}}, {"logit_bias": {5: True}}, {"template": 5},
        {"exact": "yes"}, {"top_logprobs": 3}, {"temperature": 10**400}, {"temperature": "1"}, {"schedule": 5},
        {"schedule": ["2x"]}, {"foo": 1}, {"json_schema": 5}, {"json_schema": {"a": Path}}, {"grammar": 5},
    )},
    **{f"prompts {prompts!r}": lambda llm, prompts=prompts: llm.generate(prompts, 2) for prompts in (
        None, 5, True, 1.5, b"hello", Path(),
    )},
    "encode None": lambda llm: llm.encode(None),
    "encode a text": lambda llm: llm.encode("hello"),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "pickle a stream": lambda llm: pickle.dumps(llm.stream("hello", 2)),
    **{f"LLM {given}": lambda llm, given=given: LLM(llm.loaded.checkpoint.name, **given) for given in (
        {"device": "meta"}, {"device": 5}, {"device": ["cpu"]}, {"dtype": 5}, {"engine": None}, {"quantization": 8},
        {"max_rows": 0}, {"max_rows": "8"}, {"max_rows": None}, {"schedule": 5},
        {"chat_template_kwargs": 5}, {"chat_template_kwargs": {"enable_thinking": False}},
    )},
    **{f"load {str(name)[:20]}": lambda llm, name=name: skipdecode.load(name) for name in (
        None, 5, b"x", ["x"], 2.5, "x" * 10_000, "", "\0",
    )},
    "LLM of a model": lambda llm: LLM(llm.loaded.model),
    "generate None": lambda llm: skipdecode.generate(None, "hello"),
    "attach to text": lambda llm: skipdecode.attach("model", llm.schedules["full"]),
    "attach a number": lambda llm: skipdecode.attach(llm.loaded.model, 2),
    "schedule_of": lambda llm: llm.schedule_of("2x", "many"),
    "full None": lambda llm: Schedule.full(None),
    "budgets": lambda llm: Schedule(8, (1,), 7),
    "an order": lambda llm: Schedule(8, {1, 2}, (7, 6)),
    "from_speedup": lambda llm: Schedule.from_speedup(8, "2", 16),
    "seq_len": lambda llm: Schedule.from_speedup(8, 2, None),
    "split": lambda llm: Schedule.split(8, None, 5),
    "paper": lambda llm: Schedule.paper(8, min_exit_layer=None, max_exit_layer=6, seq_len=5),
    "constant": lambda llm: Schedule.constant(8, None),
    "load a schedule": lambda llm: Schedule.load(None),
    "save a schedule": lambda llm: Schedule.full(8).save(5),
    "layers": lambda llm: Schedule.full(8).layers("1"),
    "with_speedup": lambda llm: Schedule.full(8).with_speedup(None),
    "with_speedup of 0": lambda llm: Schedule.even(8, 6).with_speedup(0),
}  # fmt: skip


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_whatever_is_wrong_is_one_line(llm: LLM, call: Callable[[LLM], Any]):
    with pytest.raises(SkipDecodeError) as error:
        call(llm)
    assert str(error.value)
    assert "\n" not in str(error.value)


def test_values_that_say_nothing_are_as_good_as_left_out(llm: LLM):
    expected = llm.generate("hello", 6)
    for options in ({"stop": None}, {"stop": []}, {"temperature": 1e-40}, {"temperature": 1e-3, "seed": 1}):
        assert llm.generate("hello", 6, **options) == expected
        assert "".join(llm.stream("hello", 6, **options)) == expected[0].text


def test_a_token_that_no_model_has_is_refused_through_transformers_too(model_dir: str):
    for options in ({"logit_bias": {99999: 5}}, {"logit_bias": {259: 5}}):
        with pytest.raises(UsageError, match="0 to 258"):
            LLM(model_dir, device="cpu", engine="transformers").generate("hello", **options)


def test_a_model_without_tokenizer_is_refused(tmp_path: Path):
    save_checkpoint(tmp_path, tokenizer=False)
    bare = skipdecode.models.loading.hub.load_model(str(tmp_path), require_tokenizer=False)
    with pytest.raises(ModelLoadError):
        LLM(bare)


@pytest.mark.parametrize("engine", ["fast", "transformers"])
@pytest.mark.parametrize("second", ["the same LLM", "another LLM of the model"])
def test_threads_wait_for_each_other(model_dir: str, engine: str, second: str):
    loaded = skipdecode.load(model_dir, device="cpu")
    llm = LLM(loaded, engine=engine)
    models = [llm, llm if second == "the same LLM" else LLM(loaded, engine=engine)]
    jobs = [(["hello you"] * (1 + i % 3), 4 + i % 5, schedule) for i in range(3) for schedule in ("full", "2x")]

    def work(llm: LLM, job: Any) -> Any:
        prompts, tokens, schedule = job
        found = texts(llm.generate(prompts, tokens, schedule=schedule))
        return found, "".join(llm.stream(prompts[0], tokens)), llm.encode(prompts)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntunedScheduleWarning)
        alone = [work(llm, job) for job in jobs]
        with ThreadPoolExecutor(3) as threads:
            rounds = 2
            found = list(threads.map(work, models * (len(jobs) * rounds // 2), jobs * rounds))
    assert found == alone * rounds
