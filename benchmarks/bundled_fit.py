"""Makes a fit of smollm2-135m: bridges and prompt maps for the schedules of a preset, presets/fit-*.json.

    python benchmarks/bundled_fit.py --words runs/chat-words --out src/skipdecode/models/fits

--words has self.jsonl, the model's own conversations, which `skipdecode tune smollm2-135m --self --self-records 260
--self-tokens 96 --self-temperature 0 --steps 1 --out runs/chat-words` writes. The fit and its schedules go to --out.
The weights are those that the package fetches. `benchmarks/chat_runs.py` makes the fit that the bundled chat adapter
starts from, of presets/fit-chat-smollm2-135m.json.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from fit_schedule import batches_of, save_fit
from shared import script_parser

from skipdecode import Schedule
from skipdecode.data.examples import Example
from skipdecode.learning.fitting import Fitter
from skipdecode.learning.settings import FitOptions
from skipdecode.models.loading.hub import load_model

PRESETS = Path(__file__).parents[1] / "presets"


def schedules_of(preset: dict[str, Any], layers: int) -> list[Schedule]:
    """The schedules of a preset, by their names."""
    found = []
    for name, values in preset["schedules"].items():
        prompt: Any = range(values["prompt"]) if "prompt" in values else "full"
        labels = {label: values[label] for label in ("family", "speedup") if label in values}
        found.append(Schedule(layers, values["drop_order"], values["budgets"], 1, prompt, name, **labels))
    return found


def conversation(tokenizer: Any, row: dict[str, str]) -> Example:
    """Token ids of a row of self.jsonl."""
    turns = [{"role": "user", "content": row["prompt"]}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True).input_ids
    response = tokenizer(row["response"], add_special_tokens=False, verbose=False).input_ids
    return Example("", tuple(prompt), (*response, tokenizer.eos_token_id))


def main() -> None:
    """Fit and write."""
    parser = script_parser(__doc__, result="directory for the fit and its schedules")
    parser.add_argument("--words", type=Path, required=True, help="directory of self.jsonl")
    parser.add_argument("--preset", type=Path, default=PRESETS / "fit-smollm2-135m.json")
    given = parser.parse_args()
    preset = json.loads(given.preset.read_text(encoding="utf-8"))
    options = preset["options"]
    loaded = load_model(options["model"], dtype="float32")
    with (given.words / "self.jsonl").open(encoding="utf-8") as lines:
        examples = [conversation(loaded.tokenizer, json.loads(line)) for line in islice(lines, options["records"])]
    schedules = schedules_of(preset, loaded.num_layers)
    chosen = FitOptions(fit_rank=options["fit_rank"], fit_taps=options["fit_taps"])
    fit = Fitter(loaded.model, batches_of(examples), chosen).fit(schedules)
    save_fit(given.out, loaded.model, fit, schedules)


if __name__ == "__main__":
    main()
