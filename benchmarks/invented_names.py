"""Writes records, and copies of those whose responses repeat names or numbers of the prompt, under invented ones.

    python benchmarks/invented_names.py --task e2e --data e2e/train.jsonl --fields mr --out named.jsonl
    skipdecode tune MODEL --task e2e --train named.jsonl --dev e2e/dev.jsonl --out tuned

A model learns the few names of a training set by heart in place of copying them. A record with other names has to be
copied from. Prompt and response are named as for `skipdecode tune`; --out is JSONL with their fields.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shared import script_parser

from skipdecode.cli.arguments import add_options, config_from
from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import json_line
from skipdecode.data.examples import RecordOptions, make_template
from skipdecode.data.records import Record
from skipdecode.data.source import read_file
from skipdecode.data.template import PromptTemplate
from skipdecode.evaluation.metrics import repeated

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
    records: Sequence[Record], template: PromptTemplate, fields: Sequence[str], seed: int, copies: int = 1
) -> list[Record]:
    """The records, and `copies` of those that repeat names or numbers of the fields, each with other invented ones."""
    draw, more = random.Random(seed), []
    for record in records:
        names = repeated(record, fields)
        for others in (invented_names(names, draw) for _ in range(copies if names else 0)):
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
    return str(draw.randint(1, 9)) + "".join(str(draw.randint(0, 9)) if c.isdigit() else c for c in value[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, invent and write."""
    parser = script_parser(__doc__, result="file of records (JSONL)")
    parser.add_argument("--data", required=True, help="JSONL or CSV file of records with responses")
    parser.add_argument("--records", type=int, help="use only the first N lines of --data")
    parser.add_argument("--fields", nargs="+", required=True, help="prompt fields with the names and numbers")
    parser.add_argument("--copies", type=int, default=3, help="copies of a record; with one, more new names get lost")
    parser.add_argument("--seed", type=int, default=0)
    add_options(parser, RecordOptions)
    given = parser.parse_args(arguments)
    options = config_from(RecordOptions, given)
    template = make_template(options)
    if wrong := [name for name in given.fields if name not in template.fields]:
        parser.error(f"--fields {wrong[0]}: accepted are {', '.join(template.fields)}")
    file = read_file(given.data, template, limit=given.records, skip_bad=options.bad_records == "skip")
    records = with_invented_names(file.items, template, given.fields, given.seed, given.copies)
    rows = ({**one.for_chat, **one.values, template.responses[0]: one.references[0]} for one in records)
    write_whole(given.out, b"".join(map(json_line, rows)))
    print(f"{len(file.items)} records and {len(records) - len(file.items)} copies: {given.out}")


if __name__ == "__main__":
    main()
