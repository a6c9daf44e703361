"""Prompts under invented names, of which `prepare` learns to copy."""

from __future__ import annotations

import random

from skipdecode.data.records import Record
from skipdecode.data.template import PromptTemplate
from skipdecode.evaluation.metrics import repeated
from skipdecode.learning.invented_names import Renaming, invented_names, with_names

TEMPLATE = PromptTemplate("{mr}\n", ("ref",))


DAYS = ["Monday", "Tuesday", "Friday"]


def renaming() -> Renaming:
    return Renaming.of([], TEMPLATE, seed=0)


def record(text: str, *references: str) -> Record:
    return Record(0, 1, 1, TEMPLATE.render({"mr": text}), None, {"mr": text}, references)


def test_made_up_names_stand_in_prompt_and_response_alike() -> None:
    mr, ref = (
        "name[The Mill], near[Mill Lane], from[1,250]",
        "The Mill near Mill Lane, from 1,250. The Mills are others.",
    )
    other = renaming().renamed(record(mr, ref))
    names = invented_names(["The Mill", "Mill Lane", "1,250"], random.Random(0))
    assert other.values == {"mr": f"name[{names['The Mill']}], near[{names['Mill Lane']}], from[{names['1,250']}]"}
    assert other.prompt == f"{other.values['mr']}\n"
    assert other.references == (with_names(ref, names),)
    assert other.references[0].endswith("The Mills are others.")
    assert names["The Mill"].startswith("The ")
    assert len(names["1,250"]) == 5
    assert names["1,250"][1] == ","
    assert not set(names) & set(names.values())
    assert all(name in other.references[0] for name in repeated(other, ["mr"]))


def test_what_is_not_repeated_or_what_many_records_have_stays() -> None:
    assert renaming().renamed(plain := record("eatType[pub]", "A pub.")) is plain
    rows = [record(f"name[Place {n}], day[{day}]", f"Place {n} opens on {day}.") for n, day in enumerate(DAYS * 4, 10)]
    others = [Renaming.of(rows, TEMPLATE, seed=0).renamed(row) for row in rows]
    assert all(day in other.prompt and day in other.references[0] for day, other in zip(DAYS * 4, others, strict=True))
    assert not any(f"{n}" in other.prompt for n, other in enumerate(others, 10))


def test_made_up_names_are_of_many_words() -> None:
    draw = random.Random(0)
    names = {name for _ in range(1000) for name in invented_names(["Bo"], draw).values()}
    assert len({word for name in names for word in name.split()}) > 600
