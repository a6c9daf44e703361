"""How records to generate from become prompts: by the template that a checkpoint was tuned on, or as the user says.

Used by the command line, the server and Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skipdecode.common.options import kinds
from skipdecode.common.plain import listed
from skipdecode.data.chats import ToolChoice
from skipdecode.data.messages import Message, chat_fields, is_message
from skipdecode.data.records import Parts, Record, Template, read_records
from skipdecode.data.shapes import NOTHING, PROMPT_FIELDS, Shape, fitting_shapes, prompt_shape, shape_of_field
from skipdecode.data.stopping import StopStrings
from skipdecode.data.tasks import load_task
from skipdecode.engine.requests import Request, Sampling
from skipdecode.errors import DataError, OptionError, UsageError
from skipdecode.models.carried import Recipe

_TOKEN_IDS = "prompt_token_ids"  # vLLM's field, in place of a text
_SAMPLING = tuple(name for name in kinds(Sampling) if name != "top_logprobs")
_LENGTHS = ("max_tokens", "max_completion_tokens")
_OF_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_READ = ("messages", "prompt", *_OF_TOOLS, *_SAMPLING, *_LENGTHS, "logit_bias", "response_format", "stop", "n")
_OF_SERVERS = ("model", "stream", "stream_options", "user", "metadata", "store")
_ANSWERED = "completions"
_FORMATS = {"text": None, "json_object": {"type": "object"}}
_OF_FORMATS, _OF_SCHEMAS = {"type", "json_schema"}, {"name", "description", "schema", "strict"}


Prompt = str | list[Message] | list[int] | Mapping[str, Any]
"""A text; a chat, as a list of ``{"role": …, "content": …}``; token ids, as a list of numbers or
``{"prompt_token_ids": …}``; or a record for the checkpoint's template.

A text goes into the template that the checkpoint was tuned on, else into the chat template of the model, if it has one.
"""


class PromptForm:
    """The prompt of a record to generate from: one field, as it stands or in a template; or the fields of the template.

    The template renders a record that has all its fields; a chat stays a chat, without the answer at its end. A plain
    text is the value of a template's only field.

    Parameters
    ----------
    name : str, optional
        The field. Default: those of the template, or else those of the record's shape (`skipdecode.data.shapes`).
    template : Template, optional
        Goes to `PromptEncoder` too. Default: prompts stay as they are.
    remark : str, optional
        One line for users: which template is used and how to do without it, or that there is another.
    chat : bool, optional
        Whether plain prompts go into the chat template; None: if the tokenizer has one. For `PromptEncoder`.

    Attribute `guessed`: the shape of the first record whose prompt was not named.
    """

    def __init__(
        self,
        name: str | None = None,
        template: Template | None = None,
        remark: str | None = None,
        chat: bool | None = False,
    ) -> None:
        self.name, self.template, self.remark, self.chat = name, template, remark, chat
        self.guessed: str | None = None

    def row(self, prompt: Prompt) -> dict[str, Any]:
        """A text, a chat or token ids as a row of a file."""
        if isinstance(prompt, Mapping):
            return dict(prompt)
        if are_token_ids(prompt):
            return {self.name or _TOKEN_IDS: prompt}
        return {self.name or ("prompt" if isinstance(prompt, str) else "messages"): prompt}

    def record(self, prompt: Prompt) -> Record:
        """A single record of a text, a chat or a row; it has an `error` if it cannot be used."""
        return next(read_records([(1, self.row(prompt))], self))

    def read(self, row: Mapping[str, Any]) -> Parts:
        """The prompt and the values of its template; raises DataError if it is missing, empty or not text."""
        if self.name is None and isinstance(body := row.get("body"), dict):
            self.guessed = self.guessed or "OpenAI's batches"
            if not str(url := row.get("url", _ANSWERED)).endswith(_ANSWERED):
                raise DataError(f"url {url!r} is not answered: give /v1/chat/completions or /v1/completions")
            as_it_is = {"chat": False} if self.template is None else {}  # a completion's prompt, as in the server
            return self._read(_of_body(body))._replace(asked=_asked(body) | as_it_is)
        if self.name is None and are_token_ids(ids := row.get(_TOKEN_IDS)):
            return Parts("", token_ids=tuple(ids or ()))
        return self._read(row)

    def _read(self, row: Mapping[str, Any]) -> Parts:
        template = self.template
        if template is not None and self._fills(row, template):
            values = template.values(row)
            if not any(value.strip() for value in values.values()):
                raise DataError(f"field {template.fields[0]!r} is empty")
            extra = {name: value for name, value in chat_fields(row, chat=False).items() if name not in values}
            return Parts(template.render(values), values, for_chat=extra)
        shape = self._shape(row)
        prompt = shape.prompt(row)
        extra = chat_fields(row, chat=not isinstance(prompt, str))
        if self.name is None and template is None and self.guessed is None:
            first = (shape.key, *(field for field in shape.fields if field != shape.key))
            self.guessed = " and ".join(field for field in first if field in row)
        left_out = () if self.name is not None else _unused(shape, row, extra)
        if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            prompt, left_out = prompt[:-1], (*left_out, f"the answer at the end of {shape.key!r}")
            if not prompt:
                raise DataError(f"field {shape.key!r} has an answer, and no message before it")
        if template is None or not isinstance(prompt, str):
            return Parts(prompt, for_chat=extra, left_out=left_out)
        values = template.values_of_text(prompt)
        return Parts(template.render(values), values, (), extra, left_out)

    def _fills(self, row: Mapping[str, Any], template: Template) -> bool:
        """Whether the template renders a row: the row has fields of it that are not chats.

        A template that is the prompt alone adds nothing to it, so a shape says what the prompt is.
        """
        if self.name is not None or (template.prompt == "{prompt}" and len(fitting_shapes(row)) == 1):
            return False
        return any(field in row and not isinstance(row[field], list) for field in template.fields)

    def _shape(self, row: Mapping[str, Any]) -> Shape:
        """The shape of a row's prompt."""
        if self.name is not None and self.name not in row:
            raise DataError(f"field {self.name!r} is missing ({_named(row)})")
        fields = PROMPT_FIELDS
        if self.template is not None:  # `mr` belongs to records of another form
            fields = (*PROMPT_FIELDS[:-1], *self.template.fields)
        shape = prompt_shape(row, fields) if self.name is None else shape_of_field(self.name)
        if shape is None and self.template is not None:
            self.template.values(row)  # raises for the missing field
        if shape is None:
            wanted = ", ".join(map(repr, PROMPT_FIELDS))
            raise DataError(f"no field {wanted}: name the field of the prompt ({_named(row)})")
        return shape


def are_token_ids(value: Any) -> bool:
    """Whether a value is a list of whole numbers, and not empty."""
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """List one or several prompts; a list of messages is one chat, and one of whole numbers its token ids."""
    found = listed(prompts, "prompts")
    is_chat = bool(found) and all(map(is_message, found))
    return [found] if is_chat or are_token_ids(found) else found


def _of_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a line of OpenAI's batches as a row."""
    rest, taken = body.keys() - {*_READ, *_OF_SERVERS}, _READ[: 2 if body.get("tool_choice") == "none" else 3]
    return {name: body[name] for name in taken if name in body} | {f"body.{x}": body[x] for x in sorted(rest)}


def _asked(body: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a body, as `Record.asked`; raises DataError for a value that is not accepted."""
    given = {name: value for name, value in body.items() if value is not None}
    drawn = {name: given[name] for name in _SAMPLING if name in given}
    drawn |= {"top_k": 0} if drawn.get("top_k") == -1 else {}  # vLLM's "all"
    found: dict[str, Any] = {"sampling": drawn}
    try:
        for name in filter(given.__contains__, _LENGTHS):
            if (accepted := kinds(Request)["max_new_tokens"].refuses(given[name])) is not None:
                raise OptionError(name, given[name], accepted)
            found["max_new_tokens"] = given[name]
        if given.get("n", 1) != 1:
            raise OptionError("n", given["n"], "1, or one line for each answer")
        if isinstance(bias := given.get("logit_bias", {}), Mapping):  # JSON's names are texts
            bias = {int(name) if str(name).isdecimal() else name: value for name, value in bias.items()}
        drawn["logit_bias"] = bias
        Sampling(**drawn)
        if (schema := schema_of(given.get("response_format", {"type": "text"}))) is not None:
            found["json_schema"] = schema
        if "messages" in given and any(name in given for name in _OF_TOOLS[:2]):
            parallel, tools = given.get("parallel_tool_calls", True), chat_fields(body, chat=True).get("tools", ())
            found["calling"] = ToolChoice.of(tools, given.get("tool_choice", "auto"), several=parallel is not False)
            if found["calling"].shown and schema is not None:
                raise OptionError("response_format", given["response_format"], "text beside tools")
        if "stop" in given:
            found["stop"] = StopStrings([given["stop"]] if isinstance(given["stop"], str) else given["stop"])
    except UsageError as e:
        raise DataError(f"body.{e}") from None
    return found


def schema_of(form: Any) -> Any:
    """The JSON schema of OpenAI's `response_format`, None for text; raises OptionError for what is not known."""
    found = form if isinstance(form, Mapping) else {}
    kind, inner = found.get("type"), found.get("json_schema")
    named = inner if isinstance(inner, Mapping) and kind == "json_schema" else {}
    if found.keys() <= _OF_FORMATS and named.keys() <= _OF_SCHEMAS:
        if inner is None and isinstance(kind, str) and kind in _FORMATS:
            return _FORMATS[kind]
        if isinstance(named.get("schema"), Mapping):
            return named["schema"]
    accepted = 'a type text, json_object, or {"type": "json_schema", "json_schema": {"schema": {...}}}'
    raise OptionError("response_format", form, accepted)


def _named(row: Mapping[str, Any]) -> str:
    """The fields of a row, at most the first eight, for an error."""
    names = [repr(name) for name in row]
    return f"the record has {', '.join(names[:8]) or 'no field'}{', …' if len(names) > 8 else ''}"


def _unused(shape: Shape, row: Mapping[str, Any], extra: Mapping[str, Any]) -> tuple[str, ...]:
    """Fields with content that do not go into the prompt."""
    used = {"id", *extra, *shape.fields}
    return tuple(repr(field) for field, value in row.items() if field not in used and value not in NOTHING)


def choose_form(
    recipe: Recipe | None,
    *,
    prompt_template: str | None = None,
    task: str | None = None,
    no_template: bool = False,
    chat: bool = False,
    field: str | None = None,
) -> PromptForm:
    """The form of prompts: as the user says; else the template that the checkpoint was tuned on; else a chat, if the
    model has a chat template; else plain.

    Parameters
    ----------
    recipe : Recipe or None
        The checkpoint's (`LoadedModel.recipe`).
    prompt_template : str, optional
        Text with fields in braces.
    task : str, optional
        Name or file of a task, whose prompt is used.
    no_template : bool
        Prompts stay as they are; lists of messages are chats all the same.
    chat : bool
        The user wants chats: a checkpoint's template that is not for chats is not used.
    field : str, optional
        The field that is the prompt, or goes into the template.

    Raises UsageError: more than one of `prompt_template`, `task` and `no_template`; a template or task that is not
    accepted.
    """
    if sum((prompt_template is not None, task is not None, no_template)) > 1:
        raise UsageError("prompt_template, task and no template each say what a prompt is: give one of them")
    if prompt_template is not None:
        return PromptForm(field, Template(prompt_template, chat=chat))
    if task is not None:
        template = load_task(task).template()
        return PromptForm(field, template, f"prompts go into the task's template {template.prompt!r}", chat)
    tuned = None if no_template else recipe_template(recipe)
    if tuned is None:
        return PromptForm(field, chat=chat or (False if no_template else None))
    through = " and the chat template" if tuned.chat else ""
    if chat and not tuned.chat:
        left = f"prompts go as chats, as asked; the checkpoint was tuned on the template {tuned.prompt!r} without chat"
        return PromptForm(field, remark=left, chat=True)
    remark = (
        f"prompts go into the checkpoint's template {tuned.prompt!r}{through} (--no-template leaves them as they are)"
    )
    return PromptForm(field, tuned, remark, chat)


def recipe_template(recipe: Recipe | None) -> Template | None:
    """The template that a checkpoint was tuned on; None if its recipe has none.

    Raises UsageError if the recipe's template is not valid.
    """
    if recipe is None or recipe.prompt_template is None:
        return None
    return Template(
        recipe.prompt_template,
        recipe.responses,
        chat=recipe.chat,
        truncate=recipe.truncate,
        max_prompt_tokens=recipe.max_prompt_tokens,
    )
