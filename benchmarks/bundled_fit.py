"""Makes a fit of smollm2-135m: bridges and prompt maps for the schedules of a preset, presets/fit-*.json.

    python benchmarks/bundled_fit.py --words runs/chat-words --out src/skipdecode/models/fits

--words has self.jsonl, the model's own conversations (`benchmarks/fitted.py` has the command that writes them). The fit
and its schedules go to --out. The weights are those that the package fetches. `benchmarks/chat_runs.py` makes the fit
that the bundled chat adapter starts from, of presets/fit-chat-smollm2-135m.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fitted import batches_of, chat_texts, read_rows, save_fit
from shared import script_parser

from skipdecode import Schedule
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


def main() -> None:
    """Fit and write."""
    parser = script_parser(__doc__, result="directory for the fit and its schedules")
    parser.add_argument("--words", type=Path, required=True, help="directory of self.jsonl")
    parser.add_argument("--preset", type=Path, default=PRESETS / "fit-smollm2-135m.json")
    given = parser.parse_args()
    preset = json.loads(given.preset.read_text(encoding="utf-8"))
    options = preset["options"]
    loaded = load_model(options["model"], dtype="float32")
    tokenizer: Any = loaded.tokenizer
    texts = chat_texts(tokenizer, read_rows(given.words / "self.jsonl", options["records"]))
    schedules = schedules_of(preset, loaded.num_layers)
    chosen = FitOptions(fit_rank=options["fit_rank"], fit_taps=options["fit_taps"])
    fit = Fitter(loaded.model, batches_of(texts), chosen).fit(schedules)
    save_fit(given.out, loaded.model, fit, schedules)


if __name__ == "__main__":
    main()
