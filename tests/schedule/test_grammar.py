"""One grammar of schedules: `parse_schedule`, and `attach`, which takes its texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skipdecode import Schedule, attach
from skipdecode.errors import ScheduleError
from skipdecode.schedule.grammar import parse_schedule
from tiny import LAYERS, tiny_model

CARRIED = Schedule.even(LAYERS, (6, 5, 4, 3))


def parsed(text: str, **options: Any) -> Schedule:
    return parse_schedule(text, LAYERS, **({"seq_len": 12} | options))


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("full", Schedule.full(LAYERS)),
        ("2x", Schedule.from_speedup(LAYERS, 2, 12)),
        ("1x", Schedule.full(LAYERS)),
        ("1.5x:p5", Schedule.from_speedup(LAYERS, 1.5, 12).with_prompt((0, 1, 2, 3, 4))),
        ("2x:pmax_exit", Schedule.from_speedup(LAYERS, 2, 12).with_prompt("max_exit")),
        ("2x:p0-2,7", Schedule.from_speedup(LAYERS, 2, 12).with_prompt((0, 1, 2, 7))),
        ("2x:flat", Schedule.from_speedup(LAYERS, 2, 12).flattened()),
        ("2x:flat:p5", Schedule.from_speedup(LAYERS, 2, 12).flattened().with_prompt((0, 1, 2, 3, 4))),
        ("2x:p5:flat", Schedule.from_speedup(LAYERS, 2, 12).with_prompt((0, 1, 2, 3, 4)).flattened()),
    ],
)
def test_each_form_is_the_schedule_that_it_names(text: str, schedule: Schedule):
    found = parsed(text)
    assert (found.budgets[0], found.budgets[-1]) == (schedule.budgets[0], schedule.budgets[-1])
    assert found.prompt_layers() == schedule.prompt_layers()
    assert [found.layers(i) for i in range(14)] == [schedule.layers(i) for i in range(14)]


def test_a_speedup_has_the_order_positions_and_prompts_of_the_checkpoint():
    carried = CARRIED.with_prompt((0, 1, 2))
    found = parsed("2x", checkpoint_schedule=carried)
    assert (found.drop_order, found.seq_len, found.prompt) == (carried.drop_order, 4, (0, 1, 2))
    assert parsed("2x", checkpoint_schedule=Schedule.full(LAYERS)).seq_len == 12


def test_names_and_files_take_endings(tmp_path: Path):
    file = tmp_path / "mine.json"
    CARRIED.save(file)
    assert parsed(str(file)) == CARRIED
    assert parsed(f"{file}:p3") == CARRIED.with_prompt((0, 1, 2))
    assert parsed("even:flat", named={"even": CARRIED}) == CARRIED.flattened()
    assert parsed("odd:p3", named={"odd:p3": CARRIED}) == CARRIED  # a name comes first


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fast", "unknown schedule 'fast': accepted are full, mine by name; a nominal speed-up such as 2x"),
        ("x2", "unknown schedule 'x2'"),
        ("2x:q3", "unknown schedule '2x:q3'"),
        ("2x:p99", "prompt layers '99' are not accepted"),
        ("0.5x", "nominal speed-up of 0.5"),
        ("99x", "nominal speed-up of 99"),
        ("", "unknown schedule ''"),
    ],
)
def test_other_texts_are_refused_in_one_line(text: str, said: str):
    with pytest.raises(ScheduleError) as refused:
        parsed(text, named={"mine": CARRIED})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_attach_takes_the_text_too():
    model = tiny_model("llama")
    ids = torch.arange(3, 15)[None]
    texts = {}
    for text in ("full", "2x:p5", Schedule.from_speedup(LAYERS, 2, 128).with_prompt((0, 1, 2, 3, 4))):
        with attach(model, text):
            texts[str(text)[:5]] = model.generate(ids, max_new_tokens=8, do_sample=False).tolist()
    assert texts["2x:p5"] == texts["Sched"] != texts["full"]
    with pytest.raises(ScheduleError, match="unknown schedule 'fast'"):
        attach(model, "fast")
    model.config.skipdecode = CARRIED.to_dict()
    with attach(model, "2x") as attachment:
        assert attachment.schedule.drop_order == CARRIED.drop_order


def test_endings_in_any_order_make_one_schedule_with_one_name():
    made = [parse_schedule(text, 30, seq_len=16) for text in ("2x:flat:p15", "2x:p15:flat")]
    assert made[0] == made[1]
    assert {schedule.name for schedule in made} == {"skipdecode-p15-2x-flat"}
    assert parse_schedule("2x:p15", 30, seq_len=16).name == "skipdecode-p15-2x"
