"""The recipe of a run: options, prompt, schedule, the data's digests, the environment, and what came of it.

`recipe.json` lies in the run's directory from its start, so a resumed run can be checked against it, and repeats the
run when it is given to `skipdecode tune --recipe`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skipdecode.common.files import write_whole
from skipdecode.data.examples import RecordFile
from skipdecode.data.records import Template
from skipdecode.errors import UsageError
from skipdecode.models.carried import RECIPE_FILE
from skipdecode.models.loading.recipe import RECIPE_FORMAT, RECIPE_KIND
from skipdecode.schedule import Schedule

_MUST_AGREE = ("options", "prompt", "schedule", "data", "checkpoint")


def make_recipe(
    options: Mapping[str, Any],
    template: Template,
    schedule: Schedule,
    data: Mapping[str, Any],
    environment: Mapping[str, Any],
    *,
    checkpoint: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """A recipe without result; JSON-ready.

    `template`: what the options made prompts of, in full. `checkpoint`: of
    `skipdecode.models.loading.base_weights.checkpoint_digest`. `base`: of
    `skipdecode.models.loading.base_weights.base_entry`.
    """
    recipe = {
        "kind": RECIPE_KIND,
        "format": RECIPE_FORMAT,
        "options": dict(options),
        "prompt": template.to_dict(),
        "schedule": schedule.to_dict(),
        "data": dict(data),
        "checkpoint": checkpoint,
        "base": base,
        "environment": dict(environment),
        "processes": processes,
        "result": None,
    }
    # Once through JSON, so that it compares equal to one that was read.
    loaded: dict[str, Any] = json.loads(json.dumps(recipe))
    return loaded


def data_entry(file: RecordFile, records: int, rejects: int) -> dict[str, Any]:
    """What a recipe says of a data file; its name without the directory, for the digest tells more."""
    name = "-" if file.stream else Path(file.name).name
    return {"file": name, "sha256": file.sha256, "records": records, "skipped": rejects}


def write_recipe(recipe: Mapping[str, Any], directory: Path) -> None:
    """Write `directory`/recipe.json; it is there whole or not at all."""
    write_whole(directory / RECIPE_FILE, json.dumps(recipe, indent=1) + "\n")


def check_same_run(stored: dict[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UsageError, naming the first difference, unless a resumed run is the run that was started."""
    if (before := stored.get("processes", 1)) != now["processes"]:
        raise UsageError(
            f"`resume`: the run was started on {before} processes, and {now['processes']} would get other batches: "
            f"launch as many, or start a new run in another `out`"
        )
    for part in _MUST_AGREE:
        before, after = stored.get(part) or {}, now[part] or {}
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                raise UsageError(
                    f"`resume`: {name} of the {part} was {before.get(name)!r} when the run was started and is now "
                    f"{after.get(name)!r}; resume with the same, or start a new run in another `out`"
                )
