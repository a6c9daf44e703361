"""The teacher-forced forward: equals the oracle and cached decoding, trains, and computes only active tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from every import EVERY, suited
from oracle import layer_list, oracle_logits, position_ids
from skipdecode import Schedule, attach
from skipdecode.errors import DepthWarning, UnsupportedFeatureError
from tiny import LAYERS, VOCAB, shared_model, tiny_model

PAPER = Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=6, seq_len=8)
SPLIT = Schedule.split(LAYERS, 4, (5, 5, 4, 3, 3))
both = pytest.mark.parametrize("schedule", [PAPER, SPLIT], ids=["paper", "split"])


def ragged_batch():
    """Two rows whose responses start and end in different columns, the first with a later turn: ids, mask, labels."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (2, 16), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    labels = ids.clone()
    labels[0, :7] = labels[0, 10:12] = -100
    labels[1, :4] = -100
    labels[1, 13:] = -100
    return ids, mask, labels


def active_rows(schedule: Schedule, labels: torch.Tensor) -> torch.Tensor:
    """(layers, rows, columns), token by token from the labels."""
    active = torch.zeros(schedule.num_layers, *labels.shape, dtype=torch.bool)
    for row, row_labels in enumerate(labels.tolist()):
        position, ended = -1, False
        for column, label in enumerate(row_labels):
            if label != -100 and not ended:
                position += 1
            elif position >= 0:
                ended = True
            if ended:
                layers = schedule.layers(10**6)
            else:
                layers = schedule.prompt_layers() if position < 0 else schedule.layers(position)
                if position < 0 and column + 1 < len(row_labels) and row_labels[column + 1] != -100:
                    layers = {*layers, *schedule.layers(0)}
            active[list(layers), row, column] = True
    return active


@both
@pytest.mark.parametrize("family", EVERY)
def test_labels_apply_the_schedule_to_each_response_and_later_turns_run_the_last_set(family: str, schedule: Schedule):
    if (schedule := suited(family, schedule)) is None:
        return
    model = shared_model(family)
    ids, mask, labels = ragged_batch()
    with attach(model, schedule), torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, labels=labels, **position_ids(model, mask))
    with torch.no_grad():
        expected = oracle_logits(model, ids, mask, active_rows(schedule, labels))
    real = mask.bool()
    assert (out.logits - expected)[real].abs().max() < 1e-4
    shifted = torch.where(labels[:, 1:] == -100, -100, labels[:, 1:])
    loss = torch.nn.functional.cross_entropy(expected[:, :-1].reshape(-1, VOCAB), shifted.reshape(-1))
    assert out.loss.item() == pytest.approx(loss.item(), abs=1e-4)


@pytest.mark.parametrize("prompt_layers", ["full", "max_exit", (0, 1, 2)], ids=str)
def test_teacher_forced_loss_is_the_loss_of_cached_decoding(schedule: Schedule, prompt_layers):
    schedule = replace(schedule, prompt=prompt_layers)
    model = tiny_model("llama")
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB, (2, 20), generator=generator)
    prompt = 8
    with attach(model, schedule) as attachment, torch.no_grad():
        forced = model(input_ids=ids, prompt_length=prompt).logits
        cache = attachment.new_cache(prompt)
        logits = [model(input_ids=ids[:, :prompt], past_key_values=cache).logits]
        for column in range(prompt, ids.shape[1]):
            logits.append(model(input_ids=ids[:, column : column + 1], past_key_values=cache).logits)
    assert (torch.cat(logits, 1) - forced).abs().max() < 1e-4


@both
def test_prompt_length_per_row_and_one_for_all(schedule: Schedule):
    model = tiny_model("qwen3")
    ids, _mask, _ = ragged_batch()
    with attach(model, schedule), torch.no_grad():
        per_row = model(input_ids=ids, prompt_length=torch.tensor([7, 4])).logits
        first = model(input_ids=ids[:1], prompt_length=7).logits
        second = model(input_ids=ids[1:], prompt_length=4).logits
    assert torch.allclose(per_row, torch.cat([first, second]), atol=1e-5)


@both
def test_prompt_length_and_cache_together_continue_as_generated(schedule: Schedule):
    model = tiny_model("llama")
    ids, _, _ = ragged_batch()
    with attach(model, schedule) as attachment, torch.no_grad():
        forced = model(input_ids=ids, prompt_length=5).logits
        cache = attachment.new_cache()
        head = model(input_ids=ids[:, :9], prompt_length=5, past_key_values=cache).logits
        tail = [model(input_ids=ids[:, c : c + 1], past_key_values=cache).logits for c in range(9, 16)]
    assert torch.allclose(torch.cat([head, *tail], 1), forced, atol=1e-4)


NO_DROPOUT = {
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "opt": {"dropout": 0.0, "attention_dropout": 0.0},
}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@both
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "bloom", "opt", "mixtral"])
def test_gradients_equal_the_oracles_with_and_without_checkpointing(family: str, schedule: Schedule):
    model = tiny_model(family, **NO_DROPOUT.get(family, {})).train()
    ids, _, labels = ragged_batch()
    mask = torch.ones_like(ids)
    logits = oracle_logits(model, ids, mask, active_rows(schedule, labels))
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
    expected = gradients(model, loss)
    with attach(model, schedule):
        plain = gradients(model, model(input_ids=ids, attention_mask=mask, labels=labels).loss)
        model.gradient_checkpointing_enable()
        checkpointed = gradients(model, model(input_ids=ids, attention_mask=mask, labels=labels).loss)
    assert max(g.abs().max() for g in expected.values()) > 1e-2
    for name, gradient in expected.items():
        assert torch.allclose(plain[name], gradient, atol=1e-4), name
        assert torch.allclose(checkpointed[name], gradient, atol=1e-4), name


@both
def test_only_active_tokens_are_computed(schedule: Schedule):
    model = tiny_model("llama")
    seen = []
    for layer in layer_list(model):
        layer.mlp.register_forward_hook(lambda m, args, out: seen.append(args[0].shape[1]))
    ids = torch.randint(3, VOCAB, (3, 20))
    labels = ids.clone()
    labels[:, :6] = -100
    with attach(model, schedule), torch.no_grad():
        model(input_ids=ids, labels=labels)
    prompts = [*[schedule.prompt_layers()] * 5, {*schedule.prompt_layers(), *schedule.layers(0)}]
    sets = prompts + [schedule.layers(i) for i in range(14)]
    assert seen == [sum(layer in layers for layers in sets) for layer in range(LAYERS)]
    assert sum(seen) < LAYERS * 20


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"output_attentions": True}, "output_attentions"),
        ({"position_ids": torch.arange(16).remainder(5).expand(2, -1)}, "packed"),
        ({"labels": torch.zeros(2, 16, dtype=torch.long), "use_cache": True}, "labels with a KV cache"),
        ({"prompt_length": torch.tensor([1, 2, 3])}, "prompt_length"),
        ({"prompt_length": -3}, "0 or more"),
        ({"prompt_length": 99}, "16 columns"),
        ({"prompt_length": 2.5}, "whole numbers"),
    ],
)
def test_what_a_schedule_cannot_give_is_refused_by_name(options, names):
    model = tiny_model("llama")
    ids, _, _ = ragged_batch()
    with attach(model, PAPER):
        with pytest.raises(UnsupportedFeatureError, match=names):
            model(input_ids=ids, **options)
        model(input_ids=ids, prompt_length=8)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"attention_mask": torch.ones(2, 16)}])
@torch.no_grad()
def test_a_forward_of_prompt_alone_says_once_that_it_runs_full_depth(options):
    """A tool that reads `model(ids).logits`, such as a scorer of texts, would measure full depth without knowing it."""
    model = tiny_model("llama")
    ids, _, _ = ragged_batch()
    with attach(model, PAPER) as attachment:
        with pytest.warns(DepthWarning, match="prompt_length"):
            first = model(input_ids=ids, **options).logits
        model(input_ids=ids, **options)  # as warnings are errors in the tests, this is silent
        with attachment.paused():
            assert torch.equal(first, model(input_ids=ids, **options).logits)
    with attach(model, PAPER), pytest.warns(DepthWarning):
        model(input_ids=ids, **options)


@torch.no_grad()
def test_a_call_of_the_decoder_alone_says_once_that_it_runs_full_depth():
    """As trainers do that compute the loss from the last states."""
    model = tiny_model("llama")
    ids, _, _ = ragged_batch()
    with attach(model, PAPER) as attachment:
        with pytest.warns(DepthWarning, match="by themselves"):
            states = model.model(ids).last_hidden_state
        with attachment.paused():
            assert torch.equal(states, model.model(ids).last_hidden_state)
        model.model(ids)
    with attach(model, Schedule.full(LAYERS)):
        model.model(ids)


@pytest.mark.parametrize(
    "schedule",
    [Schedule.full(LAYERS), replace(PAPER, prompt="max_exit"), replace(PAPER, prompt=tuple(range(LAYERS - 1)))],
    ids=["full depth", "max_exit", "prompts skip a layer"],
)
def test_a_forward_of_prompt_alone_does_not_warn_if_it_is_what_the_schedule_says(schedule: Schedule):
    model = tiny_model("llama")
    ids, _, _ = ragged_batch()
    with attach(model, schedule):  # warnings are errors in the tests
        model(input_ids=ids, use_cache=False)


def test_foreign_cache_is_refused():
    from transformers import DynamicCache

    model = tiny_model("llama")
    with attach(model, PAPER), pytest.raises(UnsupportedFeatureError, match="DynamicCache"):
        model(input_ids=torch.tensor([[5, 6]]), past_key_values=DynamicCache(config=model.config))
