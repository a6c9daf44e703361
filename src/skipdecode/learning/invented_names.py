"""Prompts under invented names, so that what is learned of them is to copy.

A model learns the few names of its records by heart in place of copying them, and then fails at a name that it has not
seen. A name that was made up can only be copied.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Self

from skipdecode.data.records import Record
from skipdecode.data.source import Records
from skipdecode.data.tasks import Task
from skipdecode.data.template import PromptTemplate
from skipdecode.evaluation.metrics import names_in, repeated
from skipdecode.evaluation.run import encode_prompts
from skipdecode.generation.llm import LLM
from skipdecode.schedule import Schedule

_ONSETS = (
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sh sk sl sn sp st str sw t th tr tw v w wh y z"
)
_RHYMES = (
    "a aff air al am an and ant ar ash ast ay e ea eck ed eft el em en end er ess et ew i ick id ig ill im in ing "
    "ip ish ist o oad oast ob ock ol om on ong oo op or oss ot ound ow u uck ud um un ung up ur us ut"
)
_FIRST = (
    "Amber Best Black Bold Broad Busy Chosen Clear Cold Cozy Curious Dancing Double Eastern Empty Evening Fallen Fine "
    "Flying Fresh Garden Glad Grand Green Half Hidden Honest Hungry Jade King's Last Little Long Lucky Market Modern "
    "Mountain New North Ocean Olive Orange Pearl Plain Purple Quick Rainy Rich Rocky Royal Salty Secret Shady Short "
    "Silver Six Slow Smiling South Stone Summer Sweet Tall Tiny Two Urban Velvet Warm White Wild Wise Yellow"
)
_LAST = (
    "Angel Apple Arrow Bakery Bank Barrel Beach Bear Bird Bottle Bowl Bread Brush Button Cabin Castle Cave Chair "
    "Cherry Clock Cloud Coast Cook Cottage Court Crab Cup Deer Diner Dog Door Dragon Eagle Feather Fern Fire Flag "
    "Flower Fountain Frog Garden Goat Grape Hall Hand Hare Hill Hook Horse Hut Inn Key Knife Ladder Lamb Leaf Lily "
    "Lion Lodge Maple Mask Mirror Moon Mouse Net Oak Owl Palace Pan Path Pear Pig Pipe Plate Pony Pot Rabbit Ram Road "
    "Room Rope Salmon Ship Shop Star Stove Table Tavern Tiger Tree Turtle Wagon Well Whale Wind Wolf"
)
_WORDS = ([a + b for a in _ONSETS.split() for b in _RHYMES.split()], _FIRST.split(), _LAST.split())
_MEASURED_EVERY = 8
COUNTED, _COMMON = 2000, 0.1  # names are counted in the first records; common is what more than a tenth have
MEASURED = [words[::_MEASURED_EVERY] for words in _WORDS]
LEARNED = [[word for i, word in enumerate(words) if i % _MEASURED_EVERY] for words in _WORDS]
"""Parts of made-up names: syllables, first words, last words. Copying is measured on others than those learned."""


@dataclass(frozen=True)
class Renaming:
    """Gives other names and numbers to records whose responses repeat some of the prompt.

    `common` names stay: what many records have, such as a weekday or a label, is learned by heart for good reason.
    """

    template: PromptTemplate
    common: frozenset[str]
    draw: random.Random
    words: Sequence[Sequence[str]]

    @classmethod
    def of(
        cls, records: Sequence[Record], template: PromptTemplate, seed: int, words: Sequence[Sequence[str]] = LEARNED
    ) -> Self:
        """Return the renaming of records; a name that more than a tenth of the first ones have is common."""
        some = records[:COUNTED]
        counts = Counter(chain.from_iterable(names_in(record, template.fields) for record in some))
        common = frozenset(name for name, count in counts.items() if count > _COMMON * len(some))
        return cls(template, common, random.Random(seed), words)

    def renamed(self, record: Record) -> Record:
        """Return the record under other names, or the same object if it repeats none."""
        names = [name for name in repeated(record, self.template.fields) if name not in self.common]
        others = invented_names(names, self.draw, self.words)
        if not others:
            return record
        values = {field: with_names(value, others) for field, value in record.values.items()}
        texts = tuple(with_names(text, others) for text in record.references)
        return replace(record, prompt=self.template.render(values), values=values, references=texts)

    def others(self, records: Iterable[Record]) -> list[Record]:
        """Return the records that repeat something, under other names."""
        return [other for record in records if (other := self.renamed(record)) is not record]


def invented_names(
    values: Iterable[str], draw: random.Random, words: Sequence[Sequence[str]] = LEARNED
) -> dict[str, str]:
    """Invent another name or number for each, the longest first; a number has as many digits."""
    ordered = sorted(set(values), key=lambda value: (-len(value), value))
    return {value: _number(value, draw) if value[0].isdigit() else _name(value, draw, words) for value in ordered}


def with_names(text: str, others: Mapping[str, str]) -> str:
    """Put others in the place of names and numbers of a text; none inside a word, and none twice."""
    if not others:
        return text
    pattern = "|".join(map(re.escape, others))
    return re.sub(rf"(?<!\w)(?:{pattern})(?!\w)", lambda match: others[match[0]], text)


def names_copied(llm: LLM, schedule: Schedule, task: Task, records: Records, common: frozenset[str]) -> float | None:
    """Return the share of the records' names that outputs repeat, of those that references repeat; None without any."""
    records, prompts = encode_prompts(task.template, records, llm.tokenizer, room=llm.context, skip_bad=True)
    outputs = llm.generate(prompts, task.max_new_tokens, schedule=schedule)
    values = [set(repeated(record, task.template.fields)).difference(common) for record in records.items]
    copied = [value in output.text for each, output in zip(values, outputs, strict=True) for value in each]
    return fmean(copied) if copied else None


def _name(value: str, draw: random.Random, words: Sequence[Sequence[str]]) -> str:
    syllables, before, after = words
    invented = "".join(draw.choices(syllables, k=draw.randint(2, 3))).capitalize()
    first, last = draw.choice(before), draw.choice(after)
    name = draw.choice([invented, last, f"{first} {invented}", f"{first} {last}"])
    return f"The {name}" if value.startswith("The ") else name


def _number(value: str, draw: random.Random) -> str:
    return str(draw.randint(1, 9)) + "".join(str(draw.randint(0, 9)) if c.isdigit() else c for c in value[1:])
