"""Run by test_tuning_objective.py in a process of its own: peak memory of a step over one batch's logits."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator

from memory_probe import resident
from skipdecode import Schedule, attach
from skipdecode.data.batches import collate
from skipdecode.data.examples import Example
from skipdecode.learning.objective import Objective, Teacher, TrainStep
from skipdecode.learning.settings import TuneConfig
from skipdecode.learning.trainer import make_optimizer
from tiny import LAYERS, tiny_model

VOCABULARY, ROWS, RESPONSE, BATCHES = 50_000, 16, 50, 3


def main() -> None:
    torch.set_num_threads(1)
    model = tiny_model("llama", vocab_size=VOCABULARY)
    few, many = (
        collate([Example(str(i), (3, 4, 5), tuple(range(3, 3 + response))) for i in range(rows)])
        for rows, response in ((1, 2), (ROWS, RESPONSE))
    )
    accelerator = Accelerator(gradient_accumulation_steps=BATCHES)
    with attach(model, Schedule.from_speedup(LAYERS, 2, RESPONSE)) as attachment:
        prepared, optimizer = accelerator.prepare(model, make_optimizer(model, TuneConfig(full=True)))
        step = TrainStep(accelerator, prepared, optimizer, Objective(Teacher(attachment, model), weight=0.5), clip=0.0)
        # Libraries load parts of themselves on first use, and the optimizer makes its state.
        step([few] * BATCHES, 1e-3)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        step([many] * BATCHES, 1e-3)
        print((resident("VmHWM") - before) / (ROWS * RESPONSE * VOCABULARY * 4))


if __name__ == "__main__":
    main()
