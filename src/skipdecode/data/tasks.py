"""Tasks as small YAML files: where records come from, how a prompt is made of one, what the output is scored with.

Knows nothing about models and metrics. A task file is checked field by field; what is not known is refused with its
line number.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from skipdecode.data.records import Template
from skipdecode.data.stopping import cut_at
from skipdecode.errors import DataError, MissingExtraError, UsageError

__all__ = ["HubSource", "Task", "load_task", "task_names"]


@dataclass(frozen=True)
class HubSource:
    """A dataset on a hub, or a local directory in the same layout.

    Parameters
    ----------
    id : str
        Name on the hub, or a directory.
    split : str
        Which split to score.
    config, revision : str, optional
        Passed on to `datasets.load_dataset`.
    fields : mapping
        Our field name to the dataset's, where they differ.
    strip : mapping
        Endings to take off a field (our name).
    """

    id: str
    split: str = "test"
    config: str | None = None
    revision: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    strip: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What is generated from, and what it is scored against.

    Parameters
    ----------
    name : str
        Short name for tables and files.
    prompt : str
        Template; ``{field}`` stands for a field of the record, ``{{`` for a brace.
    references : tuple of str
        Fields that may hold the reference text or a list of them; the first one that a record has is used.
    metrics : tuple of str
        Names of the default metrics.
    max_new_tokens : int
        Longest output.
    description, licence : str
        For readers.
    chat : bool
        Put the prompt into the model's chat template, as one message of the user.
    merge_same_prompt : bool
        Records with the same prompt become one with all their references.
    stop : tuple of str
        The output text ends before the first of these.
    truncate : str, optional
        The field that loses its end when a prompt is longer than `max_prompt_tokens`.
    max_prompt_tokens : int, optional
        Longest prompt, in tokens of the model.
    response_tokens : mapping
        ``median`` and ``p95`` of the references' lengths, for a schedule's `seq_len`.
    hub : HubSource, optional
        Where the records come from when no file is given.
    """

    name: str
    prompt: str
    references: tuple[str, ...]
    metrics: tuple[str, ...]
    max_new_tokens: int
    description: str = ""
    licence: str = ""
    chat: bool = False
    merge_same_prompt: bool = False
    stop: tuple[str, ...] = ()
    truncate: str | None = None
    max_prompt_tokens: int | None = None
    response_tokens: Mapping[str, int] = field(default_factory=dict)
    hub: HubSource | None = None

    def template(self) -> Template:
        """What makes prompt and response tokens of a record: the same for tuning and for evaluation."""
        return Template(
            self.prompt,
            self.references,
            chat=self.chat,
            truncate=self.truncate,
            max_prompt_tokens=self.max_prompt_tokens,
        )

    def cut(self, output: str) -> str:
        """The output text up to the first stop string, without white space around it."""
        return cut_at(output.lstrip(), self.stop).strip()


def task_names() -> tuple[str, ...]:
    """Tasks that come with the package."""
    return tuple(sorted(p.name[:-5] for p in _presets().iterdir() if p.name.endswith(".yaml")))


def load_task(name_or_file: str | Path, check_metric: Callable[[str], object] = str) -> Task:
    """A task by name, or from a YAML file.

    Parameters
    ----------
    check_metric : callable
        Called with the name of each metric; raises UsageError for one that it does not know.

    Raises
    ------
    UsageError
        Neither a known name nor a ``.yaml`` file.
    DataError
        The file is not YAML, or a field is unknown, missing or not accepted; with the line number.
    """
    text = str(name_or_file)
    if text in task_names():
        return _parse((_presets() / f"{text}.yaml").read_text(encoding="utf-8"), check_metric)
    path = Path(name_or_file)
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"unknown task {text!r}: accepted are {', '.join(task_names())} and task files (*.yaml)")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise DataError(f"the task file {path} is not UTF-8: {e}") from None
    try:
        return _parse(content, check_metric)
    except DataError as e:
        raise DataError(f"{path}: {e}") from None


def _presets() -> Any:
    return resources.files("skipdecode.data") / "presets"


# ---------------------------------------------------------------------- reading with line numbers


def _parse(text: str, check_metric: Callable[[str], object]) -> Task:
    try:
        import yaml
    except ImportError:
        raise MissingExtraError("reading task files", "eval") from None
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
    task = _task(data, lines)
    for name in task.metrics:
        _at_line(lines["metrics"], check_metric, name)
    return task


def _task(data: dict[str, Any], lines: dict[str, int]) -> Task:
    _known(data, lines, Task)
    values = dict(data)
    for name, kind in _KINDS.items():
        if name in values:
            values[name] = _checked(name, values[name], kind, lines[name])
    for name in ("name", "prompt", "references", "metrics", "max_new_tokens"):
        if name not in values:
            raise DataError(f"the field {name!r} is missing")
    if "hub" in values:
        values["hub"] = _hub(values["hub"], lines["hub"])
    task = Task(**values)
    _at_line(lines["prompt"], Template, task.prompt, task.references)
    _at_line(lines.get("truncate", lines.get("max_prompt_tokens")), task.template)
    return task


def _at_line(line: int | None, check: Callable[..., object], *arguments: Any) -> None:
    """Name the line of what a check refuses."""
    try:
        check(*arguments)
    except UsageError as e:
        raise DataError(str(e), line) from None


_KINDS: dict[str, type] = {
    "name": str, "prompt": str, "description": str, "licence": str, "truncate": str,
    "references": tuple, "metrics": tuple, "stop": tuple,
    "max_new_tokens": int, "max_prompt_tokens": int,
    "chat": bool, "merge_same_prompt": bool, "response_tokens": dict, "hub": dict,
}  # fmt: skip
_ACCEPTED = {
    str: "text",
    tuple: "a list of texts",
    int: "a whole number of 1 or more",
    bool: "true or false",
    dict: "fields and values",
}


def _checked(name: str, value: Any, kind: type, line: int) -> Any:
    if kind is tuple:
        good = isinstance(value, list) and all(isinstance(v, str) and v for v in value) and (value or name == "stop")
        value = tuple(value) if good else value
    elif kind is int:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    elif name == "response_tokens":
        good = isinstance(value, dict) and set(value) <= {"median", "p95"}
        good = good and all(type(v) is int and v >= 1 for v in value.values())
        if not good:
            raise DataError(f"{name}: {value!r} is not accepted: give median and p95 as whole numbers", line)
    else:
        good = isinstance(value, kind)
    if not good:
        raise DataError(f"{name}: {value!r} is not accepted: give {_ACCEPTED[kind]}", line)
    return value


def _known(data: Mapping[Any, Any], lines: Mapping[str, int], kind: type, where: str = "") -> None:
    accepted = [f.name for f in fields(kind)]
    for name in data:
        if name not in accepted:
            near = difflib.get_close_matches(str(name), accepted, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise DataError(
                f"unknown field {name!r}{where}{hint}: accepted are {', '.join(accepted)}", lines.get(str(name))
            )


def _hub(data: dict[str, Any], line: int) -> HubSource:
    _known(data, dict.fromkeys(map(str, data), line), HubSource, " in hub")
    if not isinstance(data.get("id"), str):
        raise DataError("hub lacks the field 'id', the dataset's name", line)
    for name, value in data.items():
        mapping = name in ("fields", "strip")
        good = isinstance(value, dict) and all(isinstance(v, str) for v in value.values()) if mapping else value
        if not good or (not mapping and not isinstance(value, str)):
            raise DataError(f"hub.{name}: {value!r} is not accepted: give {'names' if mapping else 'text'}", line)
    return HubSource(**data)
