"""Tasks as small YAML files: where records come from, how a prompt is made of one, what the output is scored with.

Knows nothing about models and metrics. A task file is checked field by field; what is not known is refused with its
line number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from skipdecode.common.registry import near
from skipdecode.data.records import Template
from skipdecode.data.stopping import StopStrings
from skipdecode.errors import DataError, MissingExtraError, UsageError

__all__ = ["HubSource", "Task", "load_task", "task_file", "task_names"]

_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class HubSource:
    """A dataset on a hub, or a local directory in the same layout.

    Parameters
    ----------
    id, split, config, revision : str
        Passed on to `datasets.load_dataset`; the id may be a directory.
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
        Longest output, in tokens.
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
        return StopStrings(self.stop).cut(output.lstrip()).strip()


def task_names() -> tuple[str, ...]:
    """Tasks that come with the package."""
    return tuple(sorted(p.name[:-5] for p in _presets().iterdir() if p.name.endswith(".yaml")))


def task_file(name_or_file: str | Path) -> list[Path]:
    """The YAML file that `load_task` reads; none for the name of a task that comes with the package."""
    path = Path(name_or_file)
    return [path] if path.suffix in _ENDINGS else []


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
        The file cannot be read or is not YAML, or a field is unknown, missing or not accepted; with the line number.
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
    values = _values(Task, data, lines)
    if "hub" in values:
        values["hub"] = HubSource(
            **_values(HubSource, data["hub"], dict.fromkeys(data["hub"], lines["hub"]), " of hub")
        )
    task = Task(**values)
    _at_line(lines["prompt"], Template, task.prompt, task.references)
    _at_line(lines.get("truncate", lines.get("max_prompt_tokens")), task.template)
    for name in task.metrics:
        _at_line(lines["metrics"], check_metric, name)
    return task


def _at_line(line: int | None, check: Callable[..., object], *arguments: Any) -> None:
    """Name the line of what a check refuses."""
    try:
        check(*arguments)
    except UsageError as e:
        raise DataError(str(e), line) from None


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda v: isinstance(v, str), "text"),
    "tuple[str, ...]": (lambda v: isinstance(v, list) and all(isinstance(x, str) and x for x in v), "a list of texts"),
    "int": (lambda v: type(v) is int and v >= 1, "a whole number of 1 or more"),
    "bool": (lambda v: isinstance(v, bool), "true or false"),
    "Mapping[str, int]": (
        lambda v: (
            isinstance(v, dict) and set(v) <= {"median", "p95"} and all(type(x) is int and x >= 1 for x in v.values())
        ),
        "median and p95 as whole numbers",
    ),
    "Mapping[str, str]": (lambda v: isinstance(v, dict) and all(isinstance(x, str) for x in v.values()), "names"),
    "HubSource": (lambda v: isinstance(v, dict), "fields and values"),
}
"""By how a field is annotated: whether a value fits, and what is accepted."""


def _values(kind: type, data: Mapping[Any, Any], lines: Mapping[str, int], where: str = "") -> dict[str, Any]:
    """Values for the fields of a dataclass, each checked; raises DataError with the line of the field."""
    accepted = {f.name: f for f in fields(kind)}
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    for name, value in data.items():
        line = lines.get(str(name))
        if name not in accepted:
            hint = near(name, accepted)
            raise DataError(f"unknown field {name!r}{where}{hint}: accepted are {', '.join(accepted)}", line)
        fits, wanted = _KINDS[str(accepted[name].type).removesuffix(" | None")]
        if not fits(value) or (name in needed and not value):
            raise DataError(f"{name}{where}: {value!r} is not accepted: give {wanted}", line)
    missing = [name for name in needed if name not in data]
    if missing:
        raise DataError(f"the field {missing[0]!r}{where} is missing")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
