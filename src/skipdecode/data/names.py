"""Names and numbers of a prompt that its response repeats: counted in outputs, and replaced by invented ones.

A model learns the few names of a training set by heart in place of copying them. A record with other names has to be
copied from.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from skipdecode.data.records import Record, Template
from skipdecode.errors import UsageError

__all__ = ["WORDS", "invented_names", "renamed", "repeated", "with_invented_names"]

_WORD = r"[A-ZÀ-ÖØ-Þ][\w'’-]+"
_VALUE = re.compile(rf"(?<!\w)(?:{_WORD}(?: {_WORD})*|\d[\d.,]*\d)(?!\w)")
WORDS = (
    "al an bel bo cas cor da dor el fen gar hol is ka lan lo mar mer nor o pel qui ra ros sa ston tam ul ver",
    "Amber Broad Crown Dusty Elm Fallen Grand Hidden Ivory King's Little Market North Orange Quiet Red Silver",
    "Arch Barn Corner Dove Fountain Garden Horse Inn Ladder Moon Oak Parrot Room Ship Tower Vine Wagon Yard",
)
"""Made-up names: syllables, first words, last words."""


def repeated(record: Record, fields: Sequence[str]) -> list[str]:
    """Names and numbers in these fields of a record that half of its references have too; a number has two digits."""
    found: dict[str, None] = {}
    for field in fields:
        text = record.values.get(field, "")
        small = set(re.findall(r"\w+", text))
        # A word that is written small elsewhere in the text began a sentence.
        found |= dict.fromkeys(value for value in _VALUE.findall(text) if value.lower() not in small - {value})
    texts = record.references
    return [value for value in found if 2 * sum(value in text for text in texts) >= max(1, len(texts))]


def invented_names(values: Iterable[str], draw: random.Random, words: Sequence[str] = WORDS) -> dict[str, str]:
    """Another name or number for each, the longest first; a number has as many digits."""
    ordered = sorted(set(values), key=lambda value: (-len(value), value))
    return {value: _number(value, draw) if value[0].isdigit() else _name(value, draw, words) for value in ordered}


def renamed(text: str, others: Mapping[str, str]) -> str:
    """A text with others in the place of names and numbers; none inside a word, and none twice."""
    if not others:
        return text
    pattern = "|".join(map(re.escape, others))
    return re.sub(rf"(?<!\w)(?:{pattern})(?!\w)", lambda match: others[match[0]], text)


def with_invented_names(
    records: Sequence[Record], template: Template, fields: Sequence[str], seed: int
) -> list[Record]:
    """The records, and those that repeat names or numbers of the fields once more with invented ones.

    Raises
    ------
    UsageError
        A field is not one of the template's.
    """
    if wrong := [name for name in fields if name not in template.fields]:
        raise UsageError(f"--augment-names {wrong[0]}: accepted are {', '.join(template.fields)}")
    draw, more = random.Random(seed), []
    for record in records:
        if others := invented_names(repeated(record, fields), draw):
            values = {name: renamed(value, others) for name, value in record.values.items()}
            texts = tuple(renamed(text, others) for text in record.references)
            more.append(replace(record, prompt=template.render(values), values=values, references=texts))
    return [*records, *more]


def _name(value: str, draw: random.Random, words: Sequence[str]) -> str:
    syllables, before, after = (part.split() for part in words)
    made = "".join(draw.choices(syllables, k=draw.randint(2, 3))).capitalize()
    first, last = draw.choice([*before, made]), draw.choice([*after, made])
    name = draw.choice([made, last, f"{first} {last}", f"{first} {last}"])
    return f"The {name}" if value.startswith("The ") else name


def _number(value: str, draw: random.Random) -> str:
    digits = "".join(str(draw.randint(0, 9)) if c.isdigit() else c for c in value[1:])
    return str(draw.randint(1, 9)) + digits
