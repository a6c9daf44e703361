"""Rotary positions that depend on the length of the text: a row of a batch is the row alone, in every forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_tools import decode
from oracle import active_tokens, oracle_logits
from skipdecode import Schedule, attach
from skipdecode.engine import GatedEngine
from skipdecode.engine.opening import Backend
from skipdecode.errors import UnsupportedFeatureError
from skipdecode.evaluation.scores import text_scores, token_fidelity
from skipdecode.models.forward import switch_length
from skipdecode.models.release import before
from tiny import LAYERS, ROPES, tiny_model

SWITCH, NEW = 24, 8
LENGTHS = (20, 5, 30, 24, 23)  # short, long, and such that cross the switch at different steps
PROMPTS = [[3 + (7 * i + 11 * length) % 90 for i in range(length)] for length in LENGTHS]
SCHEDULES = [Schedule.full(LAYERS), Schedule.split(LAYERS, 4, (5, 5, 4, 3, 3))]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0, 4.0, 7.0, 9.0],
    "original_max_position_embeddings": SWITCH,
    "factor": 4.0,
}
DYNAMIC = ROPES["dynamic"] | {"rope_theta": 1e4}
schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=[schedule.name for schedule in SCHEDULES])
kinds = pytest.mark.parametrize("kind", ["phi3 longrope", "llama longrope", "llama dynamic"])


def made(kind: str) -> Any:
    family, rope = kind.split()
    if rope == "dynamic":
        model = tiny_model(family, rope_parameters=dict(DYNAMIC), max_position_embeddings=SWITCH)
    else:
        sizes = {"original_max_position_embeddings": SWITCH, "sliding_window": None}
        model = tiny_model(family, rope_parameters=dict(LONGROPE), **sizes)
    model.generation_config.max_length = None
    return model


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


@torch.no_grad()
def alone(model: Any, prompt: list[int]) -> list[int]:
    cached = switch_length(model) is None or not before("5.20")  # older ones forget a text that grows beyond it
    text = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, use_cache=cached)
    return text[0, len(prompt) :].tolist()


@kinds
@schedules
def test_a_row_of_a_batch_is_generated_as_alone(kind: str, schedule: Schedule) -> None:
    rows = decode(GatedEngine(made(kind), schedule), PROMPTS, NEW)[0]
    model = made(kind)
    if schedule.is_full:  # transformers itself; with a new model, as dynamic frequencies depend on earlier texts
        assert rows == [alone(made(kind), prompt) for prompt in PROMPTS]
    with attach(model, schedule):
        assert rows == [alone(model, prompt) for prompt in PROMPTS]
    assert rows[0] == decode(GatedEngine(model, schedule), PROMPTS[:1], NEW)[0][0]


@schedules
@torch.no_grad()
def test_a_text_that_grows_beyond_the_switch_is_the_oracles_at_every_step(schedule: Schedule) -> None:
    """Phi-3's own generate makes all keys anew there; a schedule's positions must go on."""
    model = made("phi3 longrope")
    for prompt, row in zip(PROMPTS, decode(GatedEngine(model, schedule), PROMPTS, NEW)[0], strict=True):
        for step, token in enumerate(row):
            text = torch.tensor([[*prompt, *row[:step]]])
            active = active_tokens(schedule, len(prompt), text.shape[1])
            assert int(oracle_logits(model, text, torch.ones_like(text), active)[0, -1].argmax()) == token


@schedules
@torch.no_grad()
def test_attached_batches_of_phi3_go_beyond_the_switch_together_or_name_the_reason(schedule: Schedule) -> None:
    model = made("phi3 longrope")
    ids, mask = padded([PROMPTS[0], PROMPTS[1], PROMPTS[4]])
    options = {"max_new_tokens": NEW, "do_sample": False}
    with attach(model, schedule):
        with pytest.raises(UnsupportedFeatureError, match="original_max_position_embeddings"):
            model.generate(input_ids=ids, attention_mask=mask, **options)
        uncached = model.generate(input_ids=ids, attention_mask=mask, use_cache=False, **options)
        rows = [alone(model, prompt) for prompt in (*PROMPTS[:2], PROMPTS[4])]
        assert uncached[:, ids.shape[1] :].tolist() == rows
        even = torch.tensor([PROMPTS[0], PROMPTS[2][:20]])
        if before("5.20"):
            with pytest.raises(UnsupportedFeatureError, match="install transformers"):
                model.generate(input_ids=even, attention_mask=torch.ones_like(even), **options)
            options["use_cache"] = False
        together = model.generate(input_ids=even, attention_mask=torch.ones_like(even), **options)
        assert together[:, 20:].tolist() == [alone(model, row.tolist()) for row in even]


@kinds
@schedules
def test_ragged_teacher_forced_batches_score_a_row_as_alone(kind: str, schedule: Schedule) -> None:
    how, outputs = (Backend(made(kind)), schedule), [[5, 6, 7, 8, 9]] * len(PROMPTS)
    for prompt, output, (row, _) in zip(PROMPTS, outputs, text_scores(*how, PROMPTS, outputs, 9, int), strict=True):
        ((single, _),) = text_scores(*how, [prompt], [output], 1, int)
        torch.testing.assert_close(torch.tensor(row), torch.tensor(single), rtol=0, atol=1e-4)


@kinds
def test_a_teachers_rows_are_those_alone(kind: str) -> None:
    student, teacher = made(kind), made(kind)
    outputs = [[5, 6, 7, 8, 9]] * len(PROMPTS)
    for row in token_fidelity(student, Schedule.full(LAYERS), PROMPTS, outputs, teacher):
        assert abs(row["kl"]).max() < 1e-6
    (alone,) = token_fidelity(student, SCHEDULES[1], PROMPTS[1:2], outputs[:1], teacher)
    together = token_fidelity(student, SCHEDULES[1], PROMPTS, outputs, teacher)[1]
    torch.testing.assert_close(torch.tensor(together["kl"]), torch.tensor(alone["kl"]), rtol=0, atol=1e-4)


@kinds
@torch.no_grad()
def test_labels_of_padded_rows_give_the_loss_of_each_row(kind: str) -> None:
    """As a trainer collates them: padded on the right, without position ids; full depth is paused, too."""
    model = made(kind)
    width = max(LENGTHS)
    ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in PROMPTS])
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in LENGTHS])
    with attach(model, SCHEDULES[1]) as attachment:
        together = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).logits
        with attachment.paused():
            full = model(input_ids=ids, attention_mask=mask).logits
        for row, prompt in enumerate(PROMPTS):
            single = torch.tensor([prompt])
            forced = model(input_ids=single, labels=single).logits[0]
            assert (together[row, : len(prompt)] - forced).abs().max() < 1e-3
            with attachment.paused():
                assert (full[row, : len(prompt)] - model(input_ids=single).logits[0]).abs().max() < 1e-3


def test_the_rotary_embedding_is_restored() -> None:
    model = made("llama dynamic")
    rotary = model.model.rotary_emb
    with attach(model, SCHEDULES[1]):
        assert "forward" in vars(rotary)
        alone(model, PROMPTS[2])
    assert "forward" not in vars(rotary)
    assert alone(model, PROMPTS[3]) == alone(made("llama dynamic"), PROMPTS[3])  # no trace of the longer text
