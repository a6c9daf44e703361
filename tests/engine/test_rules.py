"""The rules of a checkpoint for generation are those of transformers' greedy `generate`, also under drafts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from checkpoints import byte_tokenizer
from engine_tools import Always
from skipdecode import LLM, Schedule
from skipdecode.engine import Request, Sampling
from skipdecode.engine.kernels.head import Candidates
from skipdecode.engine.opening import open_engines
from skipdecode.engine.rules import Rules
from skipdecode.engine.sampling import Predictions, Sampler
from skipdecode.errors import DataError, UsageError
from skipdecode.generation.speed import Method
from skipdecode.models.loading.hub import load_model
from textgen_tools import save_tiny_model
from tiny import LAYERS, shared_model

PROMPTS = [(5, 6, 7, 8, 5, 6), (9,), tuple(range(3, 70)), (11, 12, 13, 11, 12, 13, 11, 12)]
NEW = 14
RULES = {
    "repetition_penalty": [1.8, 0.7, 1.1],
    "encoder_repetition_penalty": [0.6, 1.5],
    "no_repeat_ngram_size": [2, 1, 3],
    "encoder_no_repeat_ngram_size": [1, 2],
    "suppress_tokens": [[*range(3, 40)], [61]],
    "begin_suppress_tokens": [[*range(3, 60)], [70]],
    "bad_words_ids": [[[token] for token in range(3, 60)], [[5, 6], [70, 71], [21]], [[22]]],
    "sequence_bias": [[[[5], 4.0], [[40, 41], -3.5], [[17], -2.0]], [[[90], -9.0]]],
    "min_length": [9, 72],
    "min_new_tokens": [6, 14],
    "forced_bos_token_id": [0, 40],
    "forced_eos_token_id": [2, [1, 2]],
    "exponential_decay_length_penalty": [[2, 1.4]],
    "remove_invalid_values": [True],
    "renormalize_logits": [True],
}
SEVERAL = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in RULES.items()})
ENDS = [21, 22, 23, 24, 25]  # enough for some texts to end


def by_transformers(model, config):
    own = GenerationConfig(**config, eos_token_id=ENDS, pad_token_id=0, max_new_tokens=NEW, do_sample=False)
    rows = [torch.tensor([prompt]) for prompt in PROMPTS]
    made = [model.generate(row, attention_mask=torch.ones_like(row), generation_config=own)[0] for row in rows]
    return [ids[len(prompt) :].tolist() for ids, prompt in zip(made, PROMPTS, strict=True)]


def by_us(model, config, engine, **options):
    kept, model.generation_config = model.generation_config, GenerationConfig(**config)
    try:
        notes = []
        backend = open_engines(model, engine, notes.append)
        assert all(f"{name}=" in notes[-1] for name in config)
        made = backend.engine(max_rows=3)
        made.planner = Always(3)
        requests = [Request(prompt, NEW, backend.sampling, frozenset(ENDS), **options) for prompt in PROMPTS]
        return [row.tokens for _ in range(2) for row in made.decode(requests)]  # with earlier answers the second time
    finally:
        model.generation_config = kept


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_that_of_transformers_in_ragged_batches(name):
    model, acts = shared_model("llama"), name in ("remove_invalid_values", "renormalize_logits")
    plain = by_transformers(model, {})
    for value in RULES[name]:
        want = by_transformers(model, {name: value})
        acts |= want != plain
        for engine, exact in (("fast", True), ("fast", False), ("transformers", True)):
            assert by_us(model, {name: value}, engine, exact=exact) == want * 2
    assert acts


@pytest.mark.filterwarnings("ignore::UserWarning")  # of lengths that cannot be
@settings(max_examples=25)
@given(SEVERAL)
def test_rules_together_are_those_of_transformers(config):
    model = shared_model("llama")
    if config:
        assert by_us(model, config, "fast") == by_transformers(model, config) * 2


@settings(max_examples=50)
@given(SEVERAL, st.integers(0, 99), st.sampled_from([0.0, 0.5, -1.0]))
def test_candidates_decide_as_all_logits_do(config, seed, penalty):
    values = torch.randn(40, 300, generator=torch.Generator().manual_seed(seed)).mul(2).round() / 2  # with ties
    config.pop("forced_eos_token_id", None)
    sampling = Sampling(**config, frequency_penalty=penalty)
    short, full = (Sampler(sampling, (5, 6, 7), 300, {2, 9}) for _ in range(2))
    assert bool(short.top) == sampling.only_lower
    for row in values:
        words = (row >= row.topk(short.top or 300).values[-1]).nonzero()[:, 0]
        rest = [int(row.argmax())], words[None], row[words][None], [len(words)], 300, lambda _, row=row: row
        found = Candidates(*rest) if short.top else row[None]
        assert Predictions(found).token(0, short).token == Predictions(row[None]).token(0, full).token


def folder_of(tmp_path, **entries):
    save_tiny_model(tmp_path, context=512)
    (tmp_path / "generation_config.json").write_text(json.dumps({"pad_token_id": 0} | entries))


def test_calls_follow_the_checkpoint_unless_they_say_otherwise(tmp_path, capsys):
    entries = {"repetition_penalty": 1.8, "do_sample": True, "top_k": 3, "num_beams": 4, "stop_strings": ["\x00"]}
    folder_of(tmp_path, **entries)
    llm, plain = LLM(tmp_path, dtype="float32"), LLM(tmp_path, dtype="float32", generation_config=False)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "generation_config" in line]
    assert all(f"{name}={value}" in line for name, value in entries.items() if name != "stop_strings")
    ruled, free = (each.generate("abcd", 20, template=False, stop=())[0].tokens for each in (llm, plain))
    assert ruled != free
    for each, options in ((llm, {"repetition_penalty": 1.0}), (plain, {})):
        assert each.generate("abcd", 20, template=False, stop=(), **options)[0].tokens == free
    assert plain.generate("abcd", 20, template=False, stop=(), repetition_penalty=1.8)[0].tokens == ruled
    stop = plain.generate("abcd", 20, template=False)[0].text[4:6]
    (tmp_path / "generation_config.json").write_text(json.dumps({"stop_strings": stop}))
    stopped = LLM(tmp_path, dtype="float32").generate("abcd", 20, template=False)[0]
    assert (stopped.finish_reason, stop in stopped.text) == ("stop", False)
    for name, wrong in (("repetition_penalty", -1.0), ("stop_strings", [""]), ("stop_strings", 5)):
        (tmp_path / "generation_config.json").write_text(json.dumps({name: wrong}))
        with pytest.raises(UsageError, match=f"generation_config.json: {name}"):
            LLM(tmp_path)


def test_schedules_and_evaluations_follow_the_checkpoint(tmp_path):
    folder_of(tmp_path, no_repeat_ngram_size=1)
    llm, prompt = LLM(tmp_path, dtype="float32"), byte_tokenizer()("abcd").input_ids
    for schedule in (None, Schedule.from_speedup(LAYERS, 2, 20)):
        found = Method(llm.backend, schedule).generate([prompt], max_new_tokens=20, eos=set()).tokens[0]
        assert len({*prompt, *found}) == len(prompt) + 20


def test_rules_take_the_forms_of_transformers_and_numpy():
    forms = {"bad_words_ids": [np.array([5]), np.array([6, 7])], "sequence_bias": {(5,): np.float32(2)}}
    listed = {"bad_words_ids": [[5], [6, 7]], "sequence_bias": [[[5], 2.0]]}
    assert Rules(**forms, forced_eos_token_id=9) == Rules(**listed, forced_eos_token_id=[9])


@pytest.mark.parametrize("text", ["{bad", "", "[]", "null"])
def test_a_broken_generation_config_is_named(tmp_path, text):
    folder = save_tiny_model(tmp_path / "model")
    Path(folder, "generation_config.json").write_text(text)
    with pytest.raises(DataError, match=r"generation_config\.json: (not JSON|a JSON object)"):
        load_model(folder)
