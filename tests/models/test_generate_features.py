"""transformers' generate under a schedule: modes, turns, caches and their names by release, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, set_seed

from checkpoints import save_checkpoint
from every import GREEDY
from oracle import layer_list, oracle_logits
from skipdecode import Schedule, attach
from skipdecode.errors import DepthWarning, UnsupportedFeatureError
from skipdecode.models.release import cache_name
from tiny import LAYERS, VOCAB, ragged_prompts, tiny_model

PAPER = Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=6, seq_len=8)
SPLIT = Schedule.split(LAYERS, 4, (5, 5, 4, 3, 3))
both = pytest.mark.parametrize("schedule", [PAPER, SPLIT], ids=["paper", "split"])
FAMILIES = ["llama", "gemma3_text", "gpt2", "opt", "bloom"]


def generate(model, seed=11, **options):
    ids, mask = ragged_prompts()
    set_seed(seed)
    settings = {"max_new_tokens": 12, "do_sample": False} | options
    return model.generate(input_ids=ids, attention_mask=mask, **settings)


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 50, "top_p": 0.95},
    "several-samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4},
    "beam-sampling": {"num_beams": 3, "do_sample": True},
    "penalties": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_equals_uncached_in_every_mode(family: str, mode: str):
    model = tiny_model(family)
    model.generation_config.eos_token_id = 2
    with attach(model, PAPER):
        cached = generate(model, **MODES[mode])
        uncached = generate(model, use_cache=False, **MODES[mode])
    assert torch.equal(cached, uncached)


def test_streamer_processor_and_criteria_see_every_token():
    class Kept:
        """The least that a streamer is."""

        def put(self, tokens):
            seen.extend(tokens.flatten().tolist())

        def end(self):
            seen.append("end")

    class Never(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, 7] = -float("inf")
            return scores

    model, seen = tiny_model("llama"), []
    with attach(model, PAPER):
        text = model.generate(
            input_ids=torch.tensor([[5, 6, 8]]),
            max_new_tokens=20,
            do_sample=False,
            streamer=Kept(),
            logits_processor=[Never()],
            stopping_criteria=[lambda ids, scores: torch.tensor([ids.shape[1] >= 13])],
        )
    assert text.shape == (1, 13)
    assert 7 not in text[0, 3:]
    assert seen == [*text[0].tolist(), "end"]


def test_layers_run_and_keys_stored_are_the_schedules():
    model = tiny_model("gemma3_text", sliding_window=64)
    calls = [0] * LAYERS
    for index, layer in enumerate(layer_list(model)):
        layer.mlp.register_forward_hook(lambda m, a, o, i=index: calls.__setitem__(i, calls[i] + a[0].shape[1]))
    for prompt in ("full", "max_exit"):
        schedule = Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=6, seq_len=8, prompt=prompt)
        calls[:] = [0] * LAYERS
        with attach(model, schedule):
            out = generate(model, max_new_tokens=15, return_dict_in_generate=True)
        # The last of 15 tokens is never fed back.
        expected = [
            9 * (layer in schedule.prompt_layers()) + sum(layer in schedule.layers(i) for i in range(14))
            for layer in range(LAYERS)
        ]
        assert calls == expected
        cache = out.past_key_values
        held = [count * (layer in schedule.layers(13)) for layer, count in enumerate(expected)]  # the others were freed
        assert [cache.tokens_held(layer) for layer in range(LAYERS)] == held
        per_token = 3 * 2 * 2 * 8 * 4  # rows, keys and values, heads, head size, bytes
        assert cache.kv_bytes() == sum(held) * per_token < cache.kv_bytes_full() == LAYERS * 23 * per_token


@both
@torch.no_grad()
def test_a_second_turn_runs_the_last_set_and_keeps_nestedness(schedule: Schedule):
    model = tiny_model("gemma3_text")
    first = torch.tensor([[5, 6, 7, 8]])
    more = torch.tensor([[11, 12, 13]])
    with attach(model, schedule):
        turn = model.generate(input_ids=first, max_new_tokens=5, **GREEDY)
        text = torch.cat([turn.sequences, more], 1)
        with pytest.warns(DepthWarning, match="second turn"):
            again = model.generate(input_ids=text, past_key_values=turn.past_key_values, max_new_tokens=6, **GREEDY)
    final = again.sequences
    # 4 prompt columns, 5 generated (the fifth is fed with the new turn, at its own position), then the last set.
    active = torch.zeros(LAYERS, final.shape[1], dtype=torch.bool)
    for column in range(final.shape[1]):
        layers = schedule.layers(max(0, column - 4) if column < 9 else 10**6) if column > 2 else ()
        active[[*layers, *(schedule.prompt_layers() if column < 4 else ())], column] = True
    expected = oracle_logits(model, final, torch.ones_like(final), active)
    assert (torch.stack(again.logits, 1) - expected[:, 11:-1]).abs().max() < 1e-4
    assert bool((active[:, 4:-1] >= active[:, 5:]).all())


@both
def test_rows_that_end_early_have_the_same_second_turn_as_alone(schedule: Schedule):
    model = tiny_model("llama")
    ids, mask = ragged_prompts()
    with attach(model, schedule):
        free = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
        stop = int(free[0, 9 + 3])  # row 0 ends at its fourth token
        options = GREEDY | {"eos_token_id": stop}
        more = torch.tensor([[11, 12]])

        def two_turns(ids, mask):
            turn = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=9, **options)
            text = torch.cat([turn.sequences, more.expand(len(ids), -1)], 1)
            said = turn.sequences[:, ids.shape[1] :]
            ended = (said == stop).cumsum(1) - (said == stop).long() > 0
            long_mask = torch.cat([mask, (~ended).long(), torch.ones(len(ids), 2, dtype=torch.long)], 1)
            whole = {"attention_mask": long_mask, "past_key_values": turn.past_key_values}
            again = model.generate(input_ids=text, max_new_tokens=6, **whole, **GREEDY)
            return again.sequences[:, text.shape[1] :]

        with pytest.warns(DepthWarning):
            together = two_turns(ids, mask)
        alone = torch.cat(  # without a second warning
            [two_turns(ids[r, mask[r].bool()][None], torch.ones(1, int(mask[r].sum()))) for r in range(3)]
        )
    assert torch.equal(together, alone)


@pytest.mark.parametrize("name", ["constant of max_exit", "the same text goes on"])
def test_a_second_turn_that_runs_the_layers_of_a_fresh_cache_does_not_warn(name: str):
    more = [11, 12, 13] if name == "constant of max_exit" else []
    schedule = replace(Schedule.constant(LAYERS, 5), prompt="max_exit") if more else PAPER
    model = tiny_model("llama")
    with attach(model, schedule):  # warnings are errors in the tests
        options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
        turn = model.generate(input_ids=torch.tensor([[5, 6, 7, 8]]), **options)
        text = torch.cat([turn.sequences, torch.tensor([more], dtype=torch.long)], 1)
        again = model.generate(input_ids=text, past_key_values=turn.past_key_values, **options)
        if more:
            assert torch.equal(again.sequences, model.generate(input_ids=text, **options).sequences)


@both
def test_a_prompt_prefix_can_be_cached_and_chunks_prefilled(schedule: Schedule):
    model = tiny_model("llama")
    ids = torch.randint(3, VOCAB, (1, 10), generator=torch.Generator().manual_seed(2))
    with attach(model, schedule) as attachment, torch.no_grad():
        plain = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
        cache = attachment.new_cache(10)
        model(input_ids=ids[:, :6], past_key_values=cache)
        reused = model.generate(input_ids=ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
        chunked = model.generate(input_ids=ids, prefill_chunk_size=3, max_new_tokens=8, do_sample=False)
    assert torch.equal(reused, plain)
    assert torch.equal(chunked, plain)


def test_embeddings_count_as_the_prompt_also_beside_ids_and_without_a_cache():
    model = tiny_model("llama")
    ids, mask = ragged_prompts()
    with attach(model, PAPER), torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        expected = generate(model, max_new_tokens=8)[:, 9:]
        options = {"inputs_embeds": embeds, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
        assert torch.equal(model.generate(**options), expected)
        assert torch.equal(model.generate(input_ids=ids[:, :1], **options)[:, -8:], expected)
        assert torch.equal(model.generate(use_cache=False, **options), expected)


def test_a_config_object_leaves_the_models_defaults_in_force():
    model = tiny_model("llama")
    ids, mask = ragged_prompts()
    own = GenerationConfig(max_new_tokens=10, pad_token_id=0, do_sample=False)
    with attach(model, PAPER):
        expected = generate(model, max_new_tokens=10)
        model.generation_config.use_cache = False
        assert torch.equal(model.generate(ids, attention_mask=mask, generation_config=own), expected)
        model.generation_config.use_cache = True
        model.generation_config.prompt_lookup_num_tokens = 3
        with pytest.raises(UnsupportedFeatureError, match="prompt_lookup_num_tokens"):
            model.generate(ids, attention_mask=mask, generation_config=own)


def test_a_cache_does_not_outlive_its_schedule_in_silence():
    model = tiny_model("llama")
    with attach(model, PAPER) as attachment:
        turn = generate(model, return_dict_in_generate=True)
        attachment.schedule = Schedule.full(LAYERS)
        with pytest.raises(UnsupportedFeatureError, match="start with a new cache"):
            model.generate(turn.sequences, past_key_values=turn.past_key_values, max_new_tokens=3)
        attachment.schedule = PAPER
        turn = generate(model, return_dict_in_generate=True)
    with pytest.raises(UnsupportedFeatureError, match="start with a new cache"):
        model.generate(turn.sequences, past_key_values=turn.past_key_values, max_new_tokens=3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"assistant_early_exit": 3}, "assistant_early_exit"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"cache_implementation": "quantized"}, "quantized"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"dola_layers": "high"}, "dola_layers"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"custom_generate": lambda *a, **k: None}, "custom_generate"),
        ({"negative_prompt_ids": torch.tensor([[5, 6]])}, "negative_prompt_ids"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options, named):
    model = tiny_model("llama")
    with attach(model, PAPER):
        with pytest.raises(UnsupportedFeatureError, match=named):
            generate(model, **options)
        with pytest.raises(UnsupportedFeatureError, match="generate_batch"):
            model.generate_batch([[1, 2]])
        with pytest.raises(UnsupportedFeatureError, match="assistant_model"):
            generate(model, assistant_model=tiny_model("llama", seed=4))
        generate(model)


def test_the_dynamic_cache_may_be_asked_for_by_name():
    model = tiny_model("llama")
    with attach(model, PAPER):
        assert torch.equal(generate(model, cache_implementation="dynamic"), generate(model))


def test_checkpointing_in_training_mode_is_refused_for_generate():
    model = tiny_model("llama").train()
    model.gradient_checkpointing_enable()
    with attach(model, PAPER), pytest.raises(UnsupportedFeatureError, match=r"model\.eval"):
        generate(model)


def test_what_cannot_work_under_a_schedule_works_at_full_depth():
    model = tiny_model("llama")
    options = {"input_ids": torch.tensor([[5, 6, 5, 6, 5]]), "prompt_lookup_num_tokens": 2, "max_new_tokens": 6}
    plain = model.generate(do_sample=False, **options)
    with attach(model, Schedule.full(LAYERS)):
        same = model.generate(do_sample=False, **options)
    assert torch.equal(plain, same)


def test_a_cache_under_a_schedule_cannot_be_rolled_back():
    model = tiny_model("llama")
    with attach(model, PAPER):
        cache = generate(model, return_dict_in_generate=True).past_key_values
    with pytest.raises(UnsupportedFeatureError, match="crop"):
        cache.crop(-2)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.kv_bytes() == cache.kv_bytes_full() == 0


def test_where_the_prompt_ends_must_be_known_if_its_last_token_runs_more_layers():
    model = tiny_model("llama")
    ids = torch.tensor([[5, 6, 7]])
    with attach(model, SPLIT) as attachment:
        with pytest.raises(UnsupportedFeatureError, match="prompt_length"):
            model(input_ids=ids, past_key_values=attachment.new_cache())
        model(input_ids=ids, past_key_values=attachment.new_cache(3))


ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
IDS = torch.arange(3, 15)[None]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a_cache_may_be_given_under_the_name_of_either_release(family: str):
    model = tiny_model(family)

    def logits(name: str) -> Tensor:
        with torch.no_grad(), attach(model, PAPER) as attachment:
            cache = attachment.new_cache(8)
            model(IDS[:, :8], **{name: cache})
            return torch.cat([model(IDS[:, n : n + 1], **{name: cache}).logits for n in range(8, 12)], 1)

    def text(name: str) -> list[int]:
        with attach(model, PAPER) as attachment:
            return model.generate(IDS, max_new_tokens=6, do_sample=False, **{name: attachment.new_cache()}).tolist()

    assert torch.equal(logits("cache"), logits("past_key_values"))
    assert text("cache") == text("past_key_values")


def test_a_cache_under_two_names_is_refused():
    model = tiny_model("llama")
    with attach(model, PAPER) as attachment:
        caches: dict[str, Any] = {name: attachment.new_cache() for name in ("cache", "past_key_values")}
        with pytest.raises(TypeError, match="give one"):
            model(IDS, **caches)
        with pytest.raises(TypeError, match="give one"):
            model.generate(IDS, max_new_tokens=2, **caches)


def test_a_layer_whose_cache_has_an_unknown_name_is_refused_in_one_sentence():
    class Later(nn.Module):
        def forward(self, hidden_states: Tensor, kv: Any = None) -> Tensor:
            return hidden_states

    with pytest.raises(UnsupportedFeatureError, match=r"Later\.forward takes no KV cache .* pip install 'transformers"):
        cache_name(Later.forward)


@pytest.mark.parametrize(("version", "said"), [("9.9.0", 1), ("5.24.3", 0)])
def test_an_untested_version_is_one_sentence_that_says_what_to_install(tmp_path: Path, version: str, said: int):
    """Metadata of another version stands first on the path; the code is that of the installed one."""
    (tmp_path / f"transformers-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n"
    (tmp_path / f"transformers-{version}.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    save_checkpoint(tmp_path / "model")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "skipdecode", "generate", "model", "ab", "--max-new-tokens", "1"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if f"transformers {version}" in line]
    assert len(lines) == said
    assert all(re.search(r"pip install 'transformers<[\d.]+,>=[\d.]+'", line) for line in lines)


@pytest.mark.parametrize("name", ["torch", "transformers", "tokenizers", "peft", "accelerate", "vllm"])
def test_ranges_end_below_a_release_and_hold_the_pinned_version(name: str):
    ranges = {each.name: each.specifier for each in map(Requirement, LINES)}
    assert any(part.operator == "<" for part in ranges[name])
    pinned = re.search(rf"^{name}==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert pinned is None or pinned[1] in ranges[name]
