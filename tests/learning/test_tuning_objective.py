"""The objective: teacher-forced loss under a schedule, its equality with cached decoding, and the teachers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.nn import functional

from skipdecode import Schedule, attach
from skipdecode.data.batches import IGNORE, Batch, collate
from skipdecode.data.examples import Example
from skipdecode.learning import objective
from skipdecode.learning.distributions import TeacherTopK
from skipdecode.learning.objective import Objective, Teacher, TrainStep, response_logits, token_losses
from skipdecode.learning.settings import TuneConfig
from skipdecode.learning.trainer import make_optimizer
from tiny import LAYERS, VOCAB, tiny_model

SCHEDULE = Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=6, seq_len=8)
FAMILIES = ["llama", "gpt2", "opt", "gemma3_text", "gpt_neox", "bloom", "qwen3_moe"]


def examples_of(*lengths: tuple[int, int]) -> list[Example]:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCAB, (count,), generator=generator).tolist())

    return [Example(f"e{i}", ids(p), ids(r)) for i, (p, r) in enumerate(lengths)]


def batch_of(*lengths: tuple[int, int]) -> Batch:
    return collate(examples_of(*lengths))


BATCH = batch_of((7, 12), (3, 5), (5, 1))


def cached_loss(attachment: Any, model: Any, batch: Batch) -> float:
    """Sum of the cross-entropy of the response tokens, decoded with a cache, one token at a time."""
    cache = attachment.new_cache(batch.prompt_length)
    loss, end = 0.0, batch.prompt_length
    ids, mask, positions = batch.input_ids, batch.attention_mask, batch.position_ids
    keywords: Callable[[slice], dict[str, Any]] = (
        (lambda part: {}) if model.config.model_type == "bloom" else (lambda part: {"position_ids": positions[:, part]})
    )
    part = slice(0, end)
    while end < ids.shape[1]:
        out = model(ids[:, part], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True, **keywords(part))
        loss += functional.cross_entropy(
            out.logits[:, -1], batch.labels[:, end], reduction="sum", ignore_index=IGNORE
        ).item()
        part, end = slice(end, end + 1), end + 1
    return loss


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", ["full", "max_exit", (0, 1, 4)], ids=str)
def test_loss_equals_the_loss_of_cached_decoding(family: str, prompt: Any) -> None:
    model = tiny_model(family)
    schedule = Schedule(LAYERS, SCHEDULE.drop_order, SCHEDULE.budgets, prompt=prompt)
    with torch.no_grad(), attach(model, schedule) as attachment:
        losses = Objective()(model, BATCH)
        assert losses.total.item() / 18 == pytest.approx(cached_loss(attachment, model, BATCH) / 18, abs=1e-4)


def lora_model(dropout: float = 0.0) -> Any:
    config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model("llama"), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model


def full_depth(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return response_logits(model, BATCH, attached=False)


def test_the_teacher_of_a_lora_model_is_the_base_model_at_full_depth() -> None:
    base = full_depth(tiny_model("llama"))
    model = lora_model(dropout=0.5).train()
    with attach(model, SCHEDULE) as attachment:
        taught = Teacher(attachment, model, adapter=model).logits(BATCH)
        student = response_logits(model, BATCH)
    torch.testing.assert_close(taught, base)
    assert not taught.requires_grad
    assert student.requires_grad
    assert model.training
    assert not torch.allclose(student, base, atol=0.1)


def test_the_frozen_copy_teaches_what_the_model_was() -> None:
    model, copy = tiny_model("llama"), tiny_model("llama")
    before = full_depth(copy)
    with attach(model, SCHEDULE) as attachment:
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        torch.testing.assert_close(Teacher(attachment, model, copy=copy).logits(BATCH), before)


def test_distillation_is_the_forward_divergence() -> None:
    model, weight = lora_model(), 0.25
    base = tiny_model("llama")
    with attach(model, SCHEDULE) as attachment:
        losses = Objective(Teacher(attachment, model, adapter=model), weight)(model, BATCH)
        student = response_logits(model, BATCH).detach()
    teacher = full_depth(base).softmax(-1)
    terms = teacher * (teacher.log() - student.softmax(-1).log())
    expected = terms.sum(-1)[BATCH.targets != IGNORE].sum().item()
    assert losses.kl.item() == pytest.approx(expected, rel=1e-4)
    mixed = 0.75 * losses.cross_entropy.item() + 0.25 * expected
    assert losses.total.item() == pytest.approx(mixed, rel=1e-4)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("top_k", [None, 8])
def test_the_gradient_is_that_of_the_formula(weight: float, top_k: int | None) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 70, VOCAB).mul(3 if top_k else 1).unbind()
    targets = torch.randint(VOCAB, (70,)).where(torch.rand(70) < 0.8, IGNORE)
    taught = teacher if top_k is None else TeacherTopK(*teacher.log_softmax(-1).topk(top_k))
    student.requires_grad_()
    cross_entropy = functional.cross_entropy(student, targets, ignore_index=IGNORE, reduction="sum")
    guess, wanted = (x.log_softmax(-1)[targets != IGNORE] for x in (student, teacher))
    if top_k is not None:  # all other tokens count as one
        tokens = taught.top_tokens[targets != IGNORE]
        tops = [x.gather(1, tokens) for x in (guess, wanted)]
        guess, wanted = (torch.cat((x, (1 - x.exp().sum(-1, keepdim=True)).log()), 1) for x in tops)
    kl = (wanted.exp() * (wanted - guess)).sum()
    losses = (1 - weight) * cross_entropy + weight * kl
    (expected,) = torch.autograd.grad(losses, student)
    total, *parts = token_losses(student, targets, taught, weight)
    assert total.item() == pytest.approx(losses.item(), rel=1e-5)
    assert not any(part.requires_grad for part in parts)
    (gradient,) = torch.autograd.grad(total * 3, student, retain_graph=True)
    torch.testing.assert_close(gradient, expected * 3)
    with pytest.raises(RuntimeError, match="earlier backward"):
        torch.autograd.grad(total, student)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_a_large_vocabulary_takes_little_more_memory_than_the_logits_of_a_batch() -> None:
    call = [sys.executable, str(Path(__file__).parents[1] / "helpers" / "loss_probe.py")]
    peak = float(subprocess.run(call, capture_output=True, text=True, check=True).stdout)
    # Student, teacher and the gradient; with the probabilities of all tokens it would be 6, with all batches more.
    assert peak < 4.5


def test_accumulated_batches_and_parts_make_the_step_of_one_large_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # an earlier run in this process may have chosen bf16
    rows, most = examples_of((7, 12), (3, 5), (2, 3)), objective.ACTIVATIONS
    parts, whole, results = [collate(rows[:2]), collate(rows[2:])], [collate(rows)], []
    for batches, memory in (parts, most), (whole, most), (whole, 1):
        monkeypatch.setattr(objective, "ACTIVATIONS", memory)  # 1: each row alone
        model = tiny_model("llama")
        accelerator = Accelerator(gradient_accumulation_steps=len(batches))
        with attach(model, SCHEDULE) as attachment:
            prepared, optimizer = accelerator.prepare(model, make_optimizer(model, TuneConfig(full=True)))
            losses = Objective(Teacher(attachment, model, top_k=8), 0.5)
            report = TrainStep(accelerator, prepared, optimizer, losses, clip=0.0)(batches, 1e-2)
        results.append((report, model.lm_head.weight.detach().clone()))
    several, one, alone = results
    for report, weights in several, alone:
        assert report.tokens == one[0].tokens == sum(map(len, rows))
        assert report.loss == pytest.approx(one[0].loss, rel=1e-5)
        assert report.gradient_norm == pytest.approx(one[0].gradient_norm, rel=1e-3)
        torch.testing.assert_close(weights, one[1], atol=2e-3, rtol=0)


def test_a_teacher_that_keeps_all_words_teaches_as_one_that_runs_and_runs_once() -> None:
    model, calls = tiny_model("llama"), []
    with attach(model, SCHEDULE) as attachment:
        wanted = Objective(Teacher(attachment, model), 1.0)(model, BATCH)
        teacher = Teacher(attachment, model, top_k=VOCAB)
        runs = teacher.logits
        teacher.logits = lambda batch: calls.append(batch) or runs(batch)  # type: ignore[method-assign]
        for batch in (BATCH, batch_of((7, 12), (3, 5), (5, 1))):  # the second time from what is kept
            losses = Objective(teacher, 1.0)(model, batch)
            assert losses.kl.item() == pytest.approx(wanted.kl.item(), rel=2e-3)
        assert len(calls) == 1
