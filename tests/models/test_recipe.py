"""What a tuned checkpoint says of its prompt and its schedules, and the prompts that are made with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints import save_adapter, save_checkpoint
from skipdecode import Schedule
from skipdecode.data.template import PromptTemplate
from skipdecode.errors import DataError
from skipdecode.models.loading.checkpoint import open_checkpoint
from skipdecode.models.loading.weights_sample import base_sample
from skipdecode.models.recipe import Recipe
from tiny import LAYERS, tiny_model

TARGET = Schedule.from_speedup(LAYERS, 2, 16)
PROMPT = {"template": "{mr}\n", "responses": ["ref"], "chat": False}
BUNDLED = Path(__file__).parents[2] / "src/skipdecode/models/adapters/e2e-smollm2-135m"


def checkpoint(folder: Path, recipe: Any = None, schedule: Schedule | None = None) -> str:
    save_checkpoint(folder, None if schedule is None else schedule.to_dict())
    if recipe is not None:
        (folder / "recipe.json").write_text(recipe if isinstance(recipe, str) else json.dumps(recipe))
    return str(folder)


def recipe_of(folder: Path, recipe: Any = None, schedule: Schedule | None = None) -> Recipe:
    return open_checkpoint(checkpoint(folder, recipe, schedule)).recipe


def test_a_checkpoint_that_was_not_tuned_has_none(tmp_path: Path) -> None:
    assert recipe_of(tmp_path) == Recipe()


def test_a_schedule_in_the_config_alone_is_what_it_was_tuned_under(tmp_path: Path) -> None:
    assert recipe_of(tmp_path, schedule=TARGET) == Recipe(tuned_under=(TARGET,))


def test_the_bundled_adapter_knows_its_prompt_and_its_schedules() -> None:
    recipe = open_checkpoint(BUNDLED).recipe
    assert recipe.template == PromptTemplate("{mr}\n", ("refs", "ref"))
    found = [(round(s.nominal_speedup, 1), len(s.prompt_layers())) for s in recipe.tuned_under]
    assert found == [(3, 10), (1, 30), (2, 10), (5, 10), (3, 30), (2, 30), (5, 30)]


def test_an_adapters_recipe_is_its_own(tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", checkpoint(tmp_path / "base", {"options": {}, "prompt": PROMPT}, TARGET))
    assert open_checkpoint(str(tmp_path / "adapter")).recipe == Recipe(tuned_under=(TARGET,))
    (tmp_path / "adapter/recipe.json").write_text(json.dumps({"options": {}, "prompt": PROMPT | {"chat": True}}))
    recipe = open_checkpoint(tmp_path / "adapter").recipe
    assert recipe == Recipe(PromptTemplate("{mr}\n", ("ref",), True), tuned_under=(TARGET,))


def test_sampled_speedups_and_prompts_are_tuned_under_too(tmp_path: Path) -> None:
    deep = TARGET.with_speedup(3)
    for speedups, prompts, others in (
        ([1.0, 2.0, 3.0], [], (Schedule.full(LAYERS), deep)),
        ([3.0, 3.0], ["2"], (deep, TARGET.with_prompt((0, 1)), deep.with_prompt((0, 1)))),
    ):
        options = {"curriculum": "sampled", "sampled_speedups": speedups, "sampled_prompts": prompts}
        recipe = recipe_of(tmp_path, {"options": options, "schedule": TARGET.to_dict()})
        assert recipe.tuned_under == (TARGET, *others)


@pytest.mark.parametrize("foreign", [{"steps": ["mix", "bake"]}, ["flour"], {"options": "none"}])
def test_another_tools_recipe_is_none(tmp_path: Path, foreign: Any) -> None:
    assert recipe_of(tmp_path, foreign) == Recipe()
    assert open_checkpoint(tmp_path).document is None  # which `eval` stores with its results


@pytest.mark.parametrize(
    "broken",
    [
        "{",
        {"options": {}, "format": 9},
        {"options": {}, "prompt": PROMPT | {"template": 3}},
        {"options": {}, "prompt": PROMPT | {"chat": "yes"}},
        {"options": {}, "prompt": "text"},
        {"options": {}, "schedule": {"num_layers": 3}},
        {"options": {}, "schedule": Schedule.full(LAYERS + 1).to_dict()},
    ],
)
def test_a_broken_recipe_is_refused_by_its_name(tmp_path: Path, broken: Any) -> None:
    with pytest.raises(DataError) as error:
        open_checkpoint(checkpoint(tmp_path, broken))
    assert str(tmp_path / "recipe.json") in str(error.value)
    assert "\n" not in str(error.value)


ONE = Recipe(PromptTemplate("{mr}\n"))
TWO = Recipe(PromptTemplate("{colour} {thing}:"))


@pytest.mark.parametrize(
    ("recipe", "prompt", "expected"),
    [
        (ONE, {"mr": "name[X]", "prompt": "no"}, "name[X]\n"),
        (ONE, "name[X]\n", "name[X]\n"),
        (ONE, [{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]),
        (ONE, {"mr": [{"role": "user", "content": "hi"}]}, [{"role": "user", "content": "hi"}]),
        (TWO, {"colour": "red", "thing": "car"}, "red car:"),
        (Recipe(PromptTemplate("Q: {q} {{}}\nA:")), "why?", "Q: why? {}\nA:"),
        (Recipe(PromptTemplate("Q: {q}\nA:")), "Q: why?\nA:", "Q: why?\nA:"),
        (Recipe(), "name[X]", "name[X]"),
    ],
)
def test_a_row_or_text_becomes_the_prompt_it_was_tuned_on(recipe: Recipe, prompt: Any, expected: Any) -> None:
    record = (recipe.template or PromptTemplate()).record_of(prompt)
    assert (record.prompt, record.error) == (expected, None)


def test_an_adapter_leaves_the_sample_of_its_bases_weights_as_it_is(tmp_path: Path) -> None:
    adapted = save_adapter(tmp_path, "base")
    assert base_sample(adapted) == base_sample(tiny_model("llama"))
