"""How many names that no training record has come through: test prompts with invented ones.

    python benchmarks/unseen_names.py runs/e2e-full-b runs/e2e-any e2e-smollm2-135m --data e2e/test.jsonl \\
      --out results/unseen-names-e2e-smollm2-135m.json

E2E's 18 test names are all among the 34 of its training records, so its scores do not tell. Greedy, bf16; a name counts
where it stands in the answer letter for letter. No syllable and no word is one of `skipdecode.learning.invented_names`,
which tuning may have seen.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

from shared import script_parser, write_result
from tqdm import tqdm

from skipdecode import LLM, Schedule
from skipdecode.data.tasks import load_task
from skipdecode.learning.invented_names import invented_names, with_names
from skipdecode.models.loading.checkpoint import open_checkpoint

NAME = re.compile(r"(?:name|near)\[([^\]]+)\]")
ADAPTER = "e2e-smollm2-135m"  # whose schedules are run
_LINES = (
    "bar cu den fil go har im jo kel len mo ner or pin ran ser tor un vi wen yar zel",
    "Ancient Bright Copper Distant Early Frozen Gentle Humble Iron Jolly Lonely Merry Noble Patient Rustic Violet",
    "Anvil Bridge Candle Drum Falcon Gate Heron Island Kettle Lantern Meadow Needle Orchard Pebble Quill Saddle",
)
WORDS = [line.split() for line in _LINES]


def questions(data: Path, records: int) -> list[tuple[str, list[str]]]:
    """The first different prompts under invented names, and those names."""
    template, draw = load_task("e2e").template, random.Random(7)
    with data.open(encoding="utf-8") as file:
        texts = dict.fromkeys(template.render(template.values(json.loads(line))) for line in file)
    renamings = [(text, invented_names(NAME.findall(text), draw, WORDS)) for text in list(texts)[:records]]
    return [(with_names(text, names), list(names.values())) for text, names in renamings]


def share(model: LLM, asked: Sequence[tuple[str, list[str]]], schedule: Schedule) -> float:
    """Names of the prompts that stand in the answers, as a share of all."""
    answers = model.generate([text for text, _ in asked], 56, schedule=schedule, template=False)
    found = [name in answer.text for (_, names), answer in zip(asked, answers, strict=True) for name in names]
    return sum(found) / len(found)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("checkpoints", nargs="+", help="directories, or names of models")
    parser.add_argument("--data", type=Path, required=True, help="E2E records (JSONL)")
    parser.add_argument("--records", type=int, default=96)
    parser.add_argument("--schedules", nargs="+", type=Path, help=f"files, in place of those of {ADAPTER}")
    options = parser.parse_args()
    asked, rows = questions(options.data, options.records), []
    given = [Schedule.load(path) for path in options.schedules or ()] or open_checkpoint(ADAPTER).recipe.tuned_under
    schedules = sorted(given, key=lambda s: (-len(s.prompt_layers()), s.nominal_speedup))
    for name in tqdm(options.checkpoints, unit="checkpoint"):
        model = LLM(name, dtype="bfloat16")
        for schedule in schedules:
            rows.append(
                {
                    "checkpoint": Path(name).name,
                    "prompt_layers": len(schedule.prompt_layers()),
                    "nominal_speedup": schedule.nominal_speedup,
                    "share": share(model, asked, schedule),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    counts = {"prompts": len(asked), "names": sum(len(names) for _, names in asked)}
    write_result(options.out, "unseen-names", {**counts, "rows": rows})


if __name__ == "__main__":
    main()
