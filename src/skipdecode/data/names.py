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
_ONSETS = (
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sh sk sl sn sp st str sw t th tr tw v w wh y z"
)
_RHYMES = (
    "a aff air al am an and ant ar ash ast ay e ea eck ed eft el em en end er ess et ew i ick id ig ill im in ing "
    "ip ish ist o oad oast ob ock ol om on ong oo op or oss ot ound ow u uck ud um un ung up ur us ut"
)
_FIRST = (
    "Amber Autumn Best Big Black Blue Bold Brave Broad Brown Busy Calm Chosen City Clear Clever Cold Country Cozy "
    "Crown Curious Daily Dancing Deep Double Dusty Eastern Elm Empty Endless Evening Fair Fallen Famous Fine Five "
    "Flying Forest Fresh Friendly Garden Giant Glad Good Grand Great Green Grey Half Happy Hidden High Honest Hot "
    "Hungry Ivory Jade Kind King's Large Last Laughing Little Local Long Lost Lucky Magic Market Midnight Modern "
    "Morning Mountain Narrow New Nine North Oak Ocean Old Olive Open Orange Painted Pearl Pink Plain Proud Purple "
    "Queen's Quick Quiet Rainy Red Rich River Rocky Round Royal Running Salty Sandy Secret Seven Shady Sharp Short "
    "Silent Silver Simple Six Sleepy Slow Small Smiling Soft South Spring Stone Strong Summer Sunny Sweet Swift "
    "Tall Three Tiny Town Two Upper Urban Valley Velvet Village Warm West White Wide Wild Winter Wise Wooden Yellow "
    "Young"
)
_LAST = (
    "Angel Apple Arch Arrow Badger Bakery Bank Barn Barrel Basket Beach Bear Bell Bird Boat Bottle Bowl Box Bread "
    "Brother Brush Butcher Button Cabin Camp Castle Cat Cave Chair Chapel Cherry Circle Clock Cloud Coach Coast "
    "Coin Cook Corner Cottage Court Cow Crab Cross Cup Deer Desk Diner Dock Dog Door Dove Dragon Duck Eagle Farm "
    "Feather Fern Field Fire Fish Flag Flower Fork Fountain Fox Frog Garden Glass Goat Goose Grape Grill Hall Hand "
    "Harbour Hare Hat Hill Hook Horn Horse House Hut Inn Jar Key Kitchen Knife Ladder Lake Lamb Lamp Leaf Lemon "
    "Lily Lion Lock Lodge Loft Maple Mask Mill Mirror Monk Moon Mouse Nest Net Nut Oak Oven Owl Palace Palm Pan "
    "Parrot Path Pear Pepper Pig Pine Pipe Plate Plum Pony Pool Pot Queen Rabbit Ram Ring Road Robin Room Rope Rose "
    "Salmon Salt Ship Shop Spoon Star Station Stove Swan Table Tavern Temple Tiger Tower Tree Turtle Vine Wagon "
    "Wall Well Whale Wheel Wind Window Wolf Yard"
)
WORDS = ([a + b for a in _ONSETS.split() for b in _RHYMES.split()], _FIRST.split(), _LAST.split())
"""Of made-up names: syllables, first words, last words. Few of them would be learned by heart."""


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


def invented_names(
    values: Iterable[str], draw: random.Random, words: Sequence[Sequence[str]] = WORDS
) -> dict[str, str]:
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
    records: Sequence[Record], template: Template, fields: Sequence[str], seed: int, copies: int = 1
) -> list[Record]:
    """The records, and `copies` of those that repeat names or numbers of the fields, each with other invented ones.

    Raises
    ------
    UsageError
        A field is not one of the template's.
    """
    if wrong := [name for name in fields if name not in template.fields]:
        raise UsageError(f"--augment-names {wrong[0]}: accepted are {', '.join(template.fields)}")
    draw, more = random.Random(seed), []
    for record in records:
        found = repeated(record, fields)
        for _ in range(copies if found else 0):
            others = invented_names(found, draw)
            values = {name: renamed(value, others) for name, value in record.values.items()}
            texts = tuple(renamed(text, others) for text in record.references)
            more.append(replace(record, prompt=template.render(values), values=values, references=texts))
    return [*records, *more]


def _name(value: str, draw: random.Random, words: Sequence[Sequence[str]]) -> str:
    syllables, before, after = words
    made = "".join(draw.choices(syllables, k=draw.randint(2, 3))).capitalize()
    first, last = draw.choice(before), draw.choice(after)
    name = draw.choice([made, last, f"{first} {made}", f"{first} {last}"])
    return f"The {name}" if value.startswith("The ") else name


def _number(value: str, draw: random.Random) -> str:
    digits = "".join(str(draw.randint(0, 9)) if c.isdigit() else c for c in value[1:])
    return str(draw.randint(1, 9)) + digits
