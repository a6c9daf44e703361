"""What tuning is for, on a task that is learned here: skipping breaks a model, tuning under the skipping repairs it."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import byte_tokenizer
from skipdecode import Schedule, attach
from skipdecode.data.examples import Example
from skipdecode.learning.settings import TuneConfig
from skipdecode.learning.trainer import Tuner
from skipdecode.models.loading.hub import load_model
from tuning_data import tuning_model

LAYERS, LENGTH = 6, 6
FULL, HALF = Schedule.full(LAYERS), Schedule.from_speedup(LAYERS, 2, LENGTH)
TOKENIZER = byte_tokenizer()


def copying(count: int, seed: int) -> list[Example]:
    """Prompts of six letters out of eight, to be repeated."""
    draw = random.Random(seed)
    texts = [draw.choices(range(70, 78), k=LENGTH) for _ in range(count)]
    return [Example(f"r{i}", (3, *text, 4), (*text, TOKENIZER.eos_token_id)) for i, text in enumerate(texts)]


TRAIN, DEV = copying(2000, 0), copying(64, 1)


def tune(model: Any, schedule: Schedule, steps: int, out: Path) -> float:
    """Tune all weights in place; returns the loss per token on the dev records."""
    config = TuneConfig(steps=steps, batch_size=32, learning_rate=3e-3, full=True, eval_every=steps, precision="fp32")
    return Tuner(model, TOKENIZER, TRAIN, DEV, schedule, config, out).run().best_dev_loss


def copied(model: Any, schedule: Schedule) -> float:
    """The share of dev prompts that greedy decoding under a schedule repeats without a mistake."""
    prompts = torch.tensor([example.prompt for example in DEV])
    with attach(model.eval(), schedule):
        texts = model.generate(prompts, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=0)
    wanted = torch.tensor([example.response[:-1] for example in DEV])
    return (texts[:, prompts.shape[1] :] == wanted).all(1).float().mean().item()


@pytest.mark.slow
def test_tuning_under_2x_repairs_what_2x_breaks(tmp_path: Path) -> None:
    model = tuning_model(num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=128, num_key_value_heads=4)
    model.apply(model._init_weights)  # the tests' large weights do not learn
    assert tune(model, FULL, 300, tmp_path / "learned") < 0.05
    assert copied(model, FULL) > 0.95
    assert copied(model, HALF) < 0.2
    # As many steps more at full depth do not help: it is the skipping that has to be learned.
    other = copy.deepcopy(model)
    tune(other, FULL, 120, tmp_path / "longer")
    assert copied(other, FULL) > 0.95
    assert copied(other, HALF) < 0.2
    assert tune(model, HALF, 120, tmp_path / "tuned") < 0.05
    tuned = load_model(str(tmp_path / "tuned"), device="cpu")
    assert tuned.checkpoint.schedule == HALF
    assert copied(tuned.model, HALF) > 0.95
