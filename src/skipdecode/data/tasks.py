"""Tasks as small YAML files: source of the records, prompt template, references and metrics.

Knows nothing about models and metrics. Every field of a task file is checked; errors name the line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from skipdecode.common.options import Options, near, option
from skipdecode.data.stopping import StopStrings
from skipdecode.data.template import PromptTemplate
from skipdecode.errors import DataError, OptionError, UsageError

_ENDINGS = (".yaml", ".yml")
T = TypeVar("T", bound=Options)


@dataclass(frozen=True)
class HubSource(Options):
    """A dataset on a hub, or a local directory in the same layout; see `datasets.load_dataset`."""

    id: str = option("of the dataset; may be a directory")
    split: str = option("its split", default="test")
    config: str | None = option("its configuration", default=None)
    revision: str | None = option("its revision", default=None)
    fields: Mapping[str, str] = option("our field names to the dataset's, where they differ", default={})
    strip: Mapping[str, str] = option("endings to take off a field (our name)", default={})


@dataclass(frozen=True)
class Task(Options):
    name: str = option("short name for tables and files")
    prompt: str = option("template; {field} stands for a field of the record, {{ for a brace")
    references: tuple[str, ...] = option(
        "fields that may hold the reference text or a list of them; the first one that a record has is used"
    )
    metrics: tuple[str, ...] = option("names of the default metrics")
    max_new_tokens: int = option("longest output, in tokens", least=1)
    description: str = option("what it is", default="")
    licence: str = option("of the records", default="")
    chat: bool = option("put the prompt into the model's chat template, as one message of the user", default=False)
    merge_same_prompt: bool = option("records with the same prompt become one with all their references", default=False)
    stop: tuple[str, ...] = option("the output text ends before the first of these", default=())
    truncate: str | None = option(
        "the field that loses its end when a prompt is longer than max_prompt_tokens", default=None
    )
    max_prompt_tokens: int | None = option("longest prompt, in tokens of the model", default=None, least=1)
    copied: tuple[str, ...] = option(
        "fields of the prompt whose names and numbers an output repeats; eval counts those that come through",
        default=(),
    )
    response_tokens: Mapping[str, int] = option(
        "median and p95 of the references' lengths, for a schedule's seq_len", default={}, least=1
    )
    hub: HubSource | None = option("where the records come from when no file is given", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not set(self.response_tokens) <= {"median", "p95"}:
            raise OptionError("response_tokens", dict(self.response_tokens), "median and p95 as whole numbers")

    @cached_property
    def template(self) -> PromptTemplate:
        """The template of prompts and responses, the same for tuning and for evaluation."""
        return PromptTemplate(self.prompt, self.references, self.chat, self.truncate, self.max_prompt_tokens)

    def cut(self, output: str) -> str:
        """The output up to the first stop string, without white space around it."""
        return StopStrings(self.stop).cut(output.lstrip()).strip()


def task_names() -> tuple[str, ...]:
    return tuple(sorted(p.name[:-5] for p in _presets().iterdir() if p.name.endswith(".yaml")))


def task_file(name_or_file: str | Path) -> list[Path]:
    """The YAML file that `load_task` reads; none for the name of a task of this package."""
    path = Path(name_or_file)
    return [path] if path.suffix in _ENDINGS else []


def load_task(name_or_file: str | Path, check_metric: Callable[[str], object] = str) -> Task:
    """A task by name, or from a YAML file.

    `check_metric`: called with the name of each metric; raises UsageError if it is not known.

    Raises UsageError: neither a known name nor a ``.yaml`` file; DataError: the file cannot be read or is not YAML, or
    a field is unknown, missing or not accepted; with the line number.
    """
    text = str(name_or_file)
    if text in task_names():
        return _parse((_presets() / f"{text}.yaml").read_text(encoding="utf-8"), check_metric)
    path = Path(name_or_file)
    if not task_file(path):
        hint = near(text, task_names())
        raise UsageError(f"unknown task {text!r}{hint}: accepted are {', '.join(task_names())} and task files (*.yaml)")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise DataError(f"the task file {path} is not UTF-8: {e}") from None
    except OSError as e:
        raise DataError(f"cannot read the task file {path}: {e.strerror or e}") from None
    try:
        return _parse(content, check_metric)
    except DataError as e:
        raise DataError(f"{path}: {e}") from None


def _presets() -> Traversable:
    return resources.files("skipdecode.data") / "presets"


def _parse(text: str, check_metric: Callable[[str], object]) -> Task:
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        problem = getattr(e, "problem", None) or "cannot be read"
        raise DataError(f"not YAML: {problem}", mark.line + 1 if mark else None) from None
    if node is None or not isinstance(data, dict):
        raise DataError("it must hold fields and values, such as 'prompt: \"{text}\"'")
    lines = {str(key.value): key.start_mark.line + 1 for key, _ in node.value}
    if isinstance(hub := data.get("hub"), dict):
        data["hub"] = _filled(HubSource, hub, dict.fromkeys(map(str, hub), lines["hub"]), " of hub")
    task = _filled(Task, data, lines)
    _at_line(lines["prompt"], PromptTemplate, task.prompt)
    _at_line(lines.get("truncate", lines.get("max_prompt_tokens")), lambda: task.template)
    for name in task.metrics:
        _at_line(lines["metrics"], check_metric, name)
    return task


def _at_line(line: int | None, check: Callable[..., object], *arguments: object) -> None:
    """Call a check; its UsageError becomes a DataError with the line."""
    try:
        check(*arguments)
    except UsageError as e:
        raise DataError(str(e), line) from None


def _filled(kind: type[T], data: Mapping[str, Any], lines: Mapping[str, int], where: str = "") -> T:
    """Options from the fields of a file; raises DataError with the line of a wrong field."""
    accepted = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    needed = [name for name, field in accepted.items() if field.default is field.default_factory is MISSING]
    for name in data:
        if name not in accepted:
            hint = near(name, accepted)
            known = ", ".join(accepted)
            raise DataError(f"unknown field {name!r}{where}{hint}: accepted are {known}", lines.get(str(name)))
    if missing := [name for name in needed if name not in data]:
        raise DataError(f"the field {missing[0]!r}{where} is missing")
    try:
        for name, value in data.items():
            if (name in needed and value in ("", [], None)) or (isinstance(value, list) and "" in value):
                raise OptionError(name, value, "a list of texts" if isinstance(value, list) else "text")
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})
    except OptionError as e:
        raise DataError(
            f"{e.name}{where}: {data[e.name]!r} is not accepted: give {e.accepted}", lines[e.name]
        ) from None
