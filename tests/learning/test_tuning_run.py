"""Whole runs on a tiny model: repeatable, resumable, stopped by NaN, and saved so that they load."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from checkpoints import byte_tokenizer
from fits import random_fit
from skipdecode import Schedule, attach
from skipdecode.data.batches import GroupedBatches, collate
from skipdecode.data.examples import Example
from skipdecode.errors import DivergedError, OutputError
from skipdecode.learning import trainer
from skipdecode.learning.checkpoint import read_log
from skipdecode.learning.objective import Objective
from skipdecode.learning.settings import TuneConfig
from skipdecode.learning.trainer import Tuner
from skipdecode.models.checkpoint_schedule import FIT_FILE
from skipdecode.models.fit import Fit, set_fit
from skipdecode.models.loading.hub import load_model
from tuning_data import LAYERS, records, save_model, tuning_model

TARGET = Schedule.from_speedup(LAYERS, 2, 16)
LOWER = (0, 1, 2, 3)
TOKENIZER = byte_tokenizer()
BASICS: dict[str, Any] = {
    "steps": 8,
    "batch_size": 4,
    "eval_every": 3,
    "checkpoint_every": 3,
    # Not what this machine would choose: losses are compared to 1e-4.
    "precision": "fp32",
}


def examples(count: int, seed: int) -> list[Example]:
    return [
        Example(
            r["id"],
            tuple(TOKENIZER(f"{r['colour']} {r['thing']}\n")["input_ids"]),
            (*TOKENIZER(r["ref"])["input_ids"], TOKENIZER.eos_token_id),
        )
        for r in records(count, seed)
    ]


TRAIN, DEV = examples(24, 0), examples(6, 1)


def tune(
    out: Path,
    *,
    train: list[Example] = TRAIN,
    resume: bool = False,
    changes: dict[str, Any] | None = None,
    base: Path | None = None,
) -> Any:
    """Run with `changes`; keys that start with `model_` go to the model's config, and `fit` gives the model one."""
    options = BASICS | (changes or {})
    model = tuning_model(options.pop("model_type", "llama"), **options.pop("model_options", {}))
    if fitted := options.pop("fit", False):
        set_fit(model, random_fit(model, [LOWER]))
    schedule = replace(TARGET, prompt=LOWER) if fitted else TARGET
    return Tuner(model, TOKENIZER, train, DEV, schedule, TuneConfig(**options), out, base and str(base)).run(
        resume=resume
    )


def losses(out: Path, kind: str = "train") -> list[tuple[int, float]]:
    return [(row["step"], row["cross_entropy"]) for row in read_log(out / "log.jsonl") if row["kind"] == kind]


def weights(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(next(iter(out.glob("*model.safetensors")))) | fitted(out)


def fitted(out: Path) -> dict[str, torch.Tensor]:
    file = out / FIT_FILE
    return dict(Fit.load(file).state_dict()) if file.is_file() else {}


class Interrupted(list[Example]):
    """Records whose n-th use is Ctrl-C."""

    left = 4 * 7 + 1  # in the eighth step, two after the checkpoint at step 6

    def __getitem__(self, index: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().__getitem__(index)


KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora with dropout": {"lora_dropout": 0.3, "distill_weight": 0.5},
    "full": {"full": True, "distill_weight": 0.5},
    "full with dropout": {
        "full": True,
        "model_type": "gpt2",
        "model_options": {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.0},
    },
    "sampled": {"sampled_speedups": (1.0, 3.0, 3.0), "sampled_prompts": ("4",)},
    "checkpointing": {"full": True, "gradient_checkpointing": True},
    "lora and a fit": {"fit": True, "distill_weight": 0.5},
    "all weights and a fit": {"fit": True, "full": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path, kind: str) -> None:
    tune(tmp_path / "unbroken", changes=KINDS[kind])
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path / "broken", train=Interrupted(TRAIN), changes=KINDS[kind])
    assert [step for step, _ in losses(tmp_path / "broken")] == list(range(1, 8))
    assert not list((tmp_path / "broken").glob("*model.safetensors"))
    tune(tmp_path / "broken", resume=True, changes=KINDS[kind])
    for what in ("train", "dev"):
        assert losses(tmp_path / "broken", what) == losses(tmp_path / "unbroken", what)
    expected = weights(tmp_path / "unbroken")
    assert ("bridges.1.down" in expected) == ("fit" in KINDS[kind])
    for name, tensor in weights(tmp_path / "broken").items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", [{}, {"full": True}, {"merge": True}])
def test_a_fit_is_trained_and_saved_with_the_weights_it_was_trained_with(tmp_path: Path, kind: Any) -> None:
    """Parts that no token needs stay as they were; the best step's fit is saved, not the last one's."""
    first = random_fit(tuning_model(), [LOWER]).half().float().state_dict()
    base = save_model(tmp_path / "base")
    changes = kind | {"fit": True, "steps": 9, "learning_rate": 1e-2, "fit_learning_rate": 1e-2}
    changed = {}
    for name, train_fit in (("trained", True), ("frozen", False)):
        result = tune(tmp_path / name, changes=changes | {"train_fit": train_fit}, base=base)
        now = fitted(tmp_path / name)
        changed[name] = {key for key in now if not torch.equal(now[key], first[key])}
        loaded = load_model(tmp_path / name, dtype="float32").model
        schedule = replace(TARGET, prompt=LOWER)
        assert dev_loss_of(loaded, schedule) == pytest.approx(result.best_dev_loss, abs=2e-3)
        assert not any("skipdecode_fit" in key for key in weights(tmp_path / name))
    skipped = {str(layer) for layer in range(1, LAYERS - 1) if layer not in TARGET.layers(TARGET.seq_len)}
    assert {f"bridges.{layer}.{part}" for layer in skipped for part in ("down", "up", "bias")} <= changed["trained"]
    assert {"maps.0.5.weight", "maps.0.5.bias", "maps.0.5.first"} <= changed["trained"]
    assert not changed["frozen"]


def test_a_fit_learns_at_a_rate_of_its_own(tmp_path: Path) -> None:
    first, base = random_fit(tuning_model(), [LOWER]).state_dict(), save_model(tmp_path / "base")
    moved = []
    for rate in (1e-2, 1e-4):
        changes = {"fit": True, "steps": 3, "learning_rate": 1e-2, "fit_learning_rate": rate}
        tune(tmp_path / str(rate), changes=changes, base=base)
        moved.append(max((now - first[key]).abs().max() for key, now in fitted(tmp_path / str(rate)).items()))
    assert moved[1] < moved[0] / 10


@pytest.mark.parametrize("changes", [{"learning_rate": 1e-2}, {"full": True, "distill_weight": 0.2}])
def test_tuning_lowers_the_loss_under_the_schedule(tmp_path: Path, changes: dict[str, Any]) -> None:
    result = tune(tmp_path, changes={"steps": 30, "eval_every": 10} | changes)
    dev = losses(tmp_path, "dev")
    assert [step for step, _ in dev] == [0, 10, 20, 30]
    assert dev[-1][1] < dev[0][1] - 0.1
    assert result.best_dev_loss == min(loss for _, loss in dev)


def dev_loss_of(model: Any, schedule: Schedule) -> float:
    batch = collate(DEV)
    with torch.no_grad(), attach(model, schedule):
        parts = Objective()(model, batch)
    return float(parts.cross_entropy) / batch.response_tokens


@pytest.mark.parametrize(
    ("changes", "is_worse"),
    [
        # Such a rate ruins the model after it was good, so the last weights are not the best.
        ({"steps": 12, "learning_rate": 3.0, "warmup_fraction": 1.0}, False),
        ({"steps": 3, "learning_rate": 9.0}, True),  # tuning that only harms keeps the weights before it
    ],
)
def test_the_best_weights_on_the_dev_records_are_kept(tmp_path: Path, changes: dict[str, Any], is_worse: bool) -> None:
    result = tune(tmp_path, changes={"full": True, "eval_every": 1} | changes)
    dev = dict(losses(tmp_path, "dev"))
    assert result.best_step < changes["steps"]
    assert (result.best_step == 0) == is_worse
    assert dev[result.best_step] == min(dev.values()) == result.best_dev_loss
    loaded = load_model(str(tmp_path))
    assert dev_loss_of(loaded.model, TARGET) == pytest.approx(result.best_dev_loss, abs=1e-4)
    assert loaded.tokenizer("red")["input_ids"] == TOKENIZER("red")["input_ids"]
    assert Schedule.from_dict(AutoModelForCausalLM.from_pretrained(tmp_path).config.skipdecode) == TARGET
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("options", "changes"), [({}, {}), ({"tie_word_embeddings": True}, {"lora_targets": ("lm_head",)})], ids=str
)
def test_an_adapter_is_small_loads_on_its_base_and_merges(tmp_path: Path, options: Any, changes: Any) -> None:
    base = save_model(tmp_path / "base", **options)
    changes = {"lora_rank": 2, "learning_rate": 1e-2, **changes}
    for name, more in (("adapter", {}), ("merged", {"merge": True})):
        config = TuneConfig(**(BASICS | changes | more))
        model = load_model(str(base)).model
        result = Tuner(model, TOKENIZER, TRAIN, DEV, TARGET, config, tmp_path / name, base_name=str(base)).run()
        assert dev_loss_of(load_model(str(tmp_path / name)).model, TARGET) == pytest.approx(
            result.best_dev_loss, abs=1e-4
        )
    adapter, merged = load_model(str(tmp_path / "adapter")), load_model(str(tmp_path / "merged"))
    assert adapter.checkpoint.schedule == merged.checkpoint.schedule == TARGET
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert not hasattr(merged.model, "get_base_model")
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(adapter.model(ids).logits, merged.model(ids).logits, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(merged.model(ids).logits, load_model(str(base)).model(ids).logits, atol=1e-2)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_truncated_checkpoint_gives_way_to_the_one_before(tmp_path: Path, kind: str, capsys: Any) -> None:
    tune(tmp_path / "unbroken", changes=KINDS[kind])
    broken = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        tune(broken, train=Interrupted(TRAIN), changes=KINDS[kind])
    newest = broken / "checkpoints" / "step-000006"
    for file in sorted(newest.iterdir())[:2]:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    tune(broken, resume=True, changes=KINDS[kind])
    assert "step-000006 cannot be read" in capsys.readouterr().err
    assert losses(broken) == losses(tmp_path / "unbroken")
    for name, tensor in weights(tmp_path / "unbroken").items():
        assert torch.equal(tensor, weights(broken)[name]), name


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path, train=Interrupted(TRAIN))
    for file in (tmp_path / "checkpoints").glob("step-*/*"):
        file.write_bytes(b"")
    with pytest.raises(OutputError, match="no checkpoint of"):
        tune(tmp_path, resume=True)


def test_the_checkpoints_stay_until_the_result_is_recorded(tmp_path: Path) -> None:
    def killed(result: Any) -> None:
        assert (tmp_path / "config.json").exists()
        assert list((tmp_path / "checkpoints").glob("step-*"))
        raise KeyboardInterrupt

    tuner = Tuner(tuning_model(), TOKENIZER, TRAIN, DEV, TARGET, TuneConfig(**BASICS, full=True), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        tuner.run(record=killed)
    seen = losses(tmp_path)
    result = tune(tmp_path, resume=True, changes={"full": True})
    assert (result.steps, losses(tmp_path)) == (8, seen)


def test_attention_of_cudnn_is_off_while_tuning_and_on_again_afterwards(tmp_path: Path) -> None:
    allowed, before = [], torch.backends.cuda.cudnn_sdp_enabled()

    class Watched(list[Example]):
        def __getitem__(self, index: Any) -> Any:
            allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
            return super().__getitem__(index)

    tune(tmp_path, train=Watched(TRAIN), changes={"steps": 1})
    assert set(allowed) == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_nan_stops_the_run_before_the_update_and_names_the_records(tmp_path: Path) -> None:
    model = tuning_model()
    config = TuneConfig(**(BASICS | {"full": True, "learning_rate": 1e30, "clip": 0, "warmup_fraction": 0}))
    with pytest.raises(DivergedError, match=r"at step \d+: stopped before the update"):
        Tuner(model, TOKENIZER, TRAIN, DEV, TARGET, config, tmp_path).run()
    attach(model, TARGET).detach()  # the model has no schedule
    report = json.loads((tmp_path / "diverged.json").read_text())
    good = losses(tmp_path)
    assert report["step"] == len(good) + 1
    assert all(math.isfinite(loss) for _, loss in good)
    indices = GroupedBatches(TRAIN, 4, seed=0).epoch(0)[report["step"] - 1]
    assert report["ids"] == [TRAIN[i].id for i in indices]


def test_weights_that_fail_on_the_dev_records_are_not_saved(tmp_path: Path) -> None:
    changes = {"full": True, "learning_rate": 3e38, "clip": 0, "warmup_fraction": 0, "steps": 1}
    with pytest.raises(DivergedError, match="the loss on the dev records is nan after step 1: lower"):
        tune(tmp_path, changes=changes)
    assert not (tmp_path / "model.safetensors").exists()


def test_the_log_counts_real_tokens_and_follows_the_curriculum(tmp_path: Path) -> None:
    changes = {"steps": 6, "accumulation": 2} | KINDS["sampled"]
    result = tune(tmp_path, changes=changes)
    rows = [row for row in read_log(tmp_path / "log.jsonl") if row["kind"] == "train"]
    # 6 steps of 2 batches of 4: the 24 records, twice.
    assert sum(row["tokens"] for row in rows) == result.tokens == 2 * sum(map(len, TRAIN))
    assert result.tokens_per_s == pytest.approx(result.tokens / result.seconds, rel=0.01)
    curriculum = TuneConfig(**(BASICS | changes)).curriculum(TARGET)
    drawn = [curriculum.schedule_at(step) for step in range(6)]
    assert len(set(drawn)) > 1
    assert [(row["schedule"], row["mean_budget"]) for row in rows] == [(s.name, s.mean_budget()) for s in drawn]


def test_sampled_budgets_are_judged_at_every_speed_up(tmp_path: Path) -> None:
    result = tune(tmp_path, changes=KINDS["sampled"])
    row = next(row for row in read_log(tmp_path / "log.jsonl") if row["kind"] == "dev")
    split = [TARGET.with_prompt(tuple(range(4))).name, "skipdecode-p4-3x"]
    by_schedule = [row[name] for name in (TARGET.name, "full", "skipdecode-3x", *split)]
    assert len({*by_schedule}) == 5
    assert row["cross_entropy"] == pytest.approx(sum(by_schedule) / 5)
    assert result.best_dev_loss <= row["cross_entropy"]


def test_gradient_checkpointing_changes_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(trainer, "memory_gib", lambda: 1e-4)
    calls = dict.fromkeys(("plain", "checkpointed"), 0)
    original = LlamaMLP.forward

    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls[name] += 1
        return original(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    for name in calls:
        tune(tmp_path / name, changes={"full": True, "gradient_checkpointing": name == "checkpointed"})
        assert ("the longest record has" in capsys.readouterr().err) == (name == "plain")
    plain, checkpointed = losses(tmp_path / "plain"), losses(tmp_path / "checkpointed")
    assert calls["checkpointed"] > 1.3 * calls["plain"]  # the forward pass again, in the backward pass
    assert [loss for _, loss in plain] == pytest.approx([loss for _, loss in checkpointed], rel=1e-4)


@pytest.fixture
def fresh_accelerate() -> Iterator[Callable[[], None]]:
    """accelerate fixes the arithmetic of a process at its first use; this lets a test choose."""
    AcceleratorState._reset_state()
    yield AcceleratorState._reset_state
    AcceleratorState._reset_state()


def test_bf16_trains_fp32_weights(tmp_path: Path, fresh_accelerate: Any) -> None:
    result = tune(tmp_path, changes={"full": True, "precision": "bf16"})
    assert result.precision == "bf16"
    assert {tensor.dtype for tensor in weights(tmp_path).values()} == {torch.float32}
    assert losses(tmp_path)[-1][1] < losses(tmp_path)[0][1]


def test_the_frozen_teacher_computes_as_the_student_does(tmp_path: Path, fresh_accelerate: Any) -> None:
    changes = {"full": True, "precision": "bf16", "distill_weight": 0.5, "teacher_top_k": 0}
    changes |= {"steps": 1, "warmup_fraction": 0.0}
    options = TuneConfig(**(BASICS | changes))
    Tuner(tuning_model("llama"), TOKENIZER, TRAIN, DEV, Schedule.full(LAYERS), options, tmp_path).run()
    # At full depth and before the first update both are one model: any difference is one of arithmetic.
    assert [row["kl"] for row in read_log(tmp_path / "log.jsonl") if row["kind"] == "train"] == [0.0]


def test_a_rate_that_raises_the_loss_is_halved_from_the_initial_weights(tmp_path: Path, capsys: Any) -> None:
    tune(tmp_path, changes={"learning_rate": 1.0, "steps": 20, "eval_every": 2, "warmup_fraction": 0.0})
    assert "back to the initial weights, with half of the learning rate" in capsys.readouterr().err
    (_, begun), (raised_at, raised), *_ = losses(tmp_path, "dev")
    assert raised > begun
    rates = {row["step"]: row["learning_rate"] for row in read_log(tmp_path / "log.jsonl") if row["kind"] == "train"}
    assert rates[raised_at + 1] < 0.6 * rates[raised_at]


def test_a_run_ends_early_where_its_loss_no_longer_falls(tmp_path: Path) -> None:
    result = tune(tmp_path, changes={"early_stop": 0.9, "steps": 30, "eval_every": 30})  # nothing takes off so much
    assert result.steps == 8
    assert result.best_dev_loss <= losses(tmp_path, "dev")[0][1]
