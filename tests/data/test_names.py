"""Names and numbers that a response repeats: which count."""

from __future__ import annotations

from skipdecode.data.records import Record, Template
from skipdecode.data.tasks import repeated

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
