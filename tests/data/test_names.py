"""Names and numbers that a response repeats: which count, and records with invented ones in their place."""

from __future__ import annotations

import random

import pytest

from skipdecode.data.names import invented_names, renamed, repeated, with_invented_names
from skipdecode.data.records import Record, Template
from skipdecode.errors import UsageError

TEMPLATE = Template("{mr}\n", "ref")


def record(text: str, *references: str) -> Record:
    return Record(0, 1, 1, TEMPLATE.render({"mr": text}), None, {"mr": text}, references)


def test_what_counts_is_what_the_references_repeat() -> None:
    mr = "name[The Vaults], eatType[pub], priceRange[more than £30], rating[5 out of 5], near[Café Adriatic]"
    assert repeated(record(mr, "The Vaults pub near Café Adriatic: from £30."), ["mr"]) == [
        "The Vaults", "30", "Café Adriatic",
    ]  # fmt: skip
    assert repeated(record(mr, "The Vaults is a pub.", "The Vaults: near Café Adriatic."), ["mr"]) == [
        "The Vaults", "Café Adriatic",
    ]  # fmt: skip
    assert repeated(record(mr, "A pub.", "The Vaults.", "Beer."), ["mr"]) == []
    assert repeated(record("Reading is fun. I like reading, Anna.", "Reading, says Anna"), ["mr"]) == ["Anna"]
    assert repeated(record(mr, "The Vaults"), ["other"]) == []


def test_made_up_names_stand_in_prompt_and_response_alike() -> None:
    mr, ref = (
        "name[The Mill], near[Mill Lane], from[1,250]",
        "The Mill near Mill Lane, from 1,250. The Mills are others.",
    )
    first, other = with_invented_names([record(mr, ref)], TEMPLATE, ["mr"], seed=0)
    assert (first.prompt, first.references) == (f"{mr}\n", (ref,))
    names = invented_names(["The Mill", "Mill Lane", "1,250"], random.Random(0))
    assert other.values == {"mr": f"name[{names['The Mill']}], near[{names['Mill Lane']}], from[{names['1,250']}]"}
    assert other.prompt == f"{other.values['mr']}\n"
    assert other.references == (renamed(ref, names),)
    assert other.references[0].endswith("The Mills are others.")
    assert names["The Mill"].startswith("The ")
    assert len(names["1,250"]) == 5
    assert names["1,250"][1] == ","
    assert not set(names) & set(names.values())


def test_every_copy_has_other_names() -> None:
    place = record("name[The Mill], near[Mill Lane]", "The Mill near Mill Lane.")
    records = with_invented_names([place, record("eatType[pub]", "A pub.")], TEMPLATE, ["mr"], seed=0, copies=3)
    assert len(records) == 2 + 3
    assert len({(one.prompt, one.references) for one in records}) == 5
    assert all(name in one.references[0] for one in records[2:] for name in repeated(one, ["mr"]))
    assert all(len(repeated(one, ["mr"])) == 2 for one in records[2:])


def test_made_up_names_are_of_many_words() -> None:
    draw = random.Random(0)
    names = {name for _ in range(1000) for name in invented_names(["Bo"], draw).values()}
    assert len({word for name in names for word in name.split()}) > 600


def test_a_record_without_names_is_learned_once_and_an_unknown_field_refused() -> None:
    plain = record("eatType[pub]", "A pub.")
    assert with_invented_names([plain], TEMPLATE, ["mr"], seed=0) == [plain]
    with pytest.raises(UsageError, match="augment-names"):
        with_invented_names([plain], TEMPLATE, ["name"], seed=0)
