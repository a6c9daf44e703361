"""How the text of a prompt is generated (`Decoding`), and what comes of it (`Output`).

A line of OpenAI's batches has settings of its own, and an answer of another form than an output record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from skipdecode.common.options import kinds, near
from skipdecode.common.plain import unwrapped
from skipdecode.data.chats import ToolChoice
from skipdecode.data.messages import chat_fields
from skipdecode.data.prompts import EncodedPrompt
from skipdecode.data.records import OwnSettings, ReadRow, Record
from skipdecode.data.stopping import StopStrings
from skipdecode.data.template import PromptTemplate
from skipdecode.engine.requests import FinishReason, Request, Sampling
from skipdecode.errors import DataError, OptionError, UsageError
from skipdecode.generation.calls import CallForm, CallReader
from skipdecode.generation.grammar import Grammars

OPTIONS = ("max_new_tokens", "schedule", "stop", "template", "exact", "json_schema")
"""The options of `skipdecode.LLM.generate` beside the fields of `Sampling`."""
BATCH_LINES = "OpenAI's batches"
_SAMPLING = tuple(name for name in kinds(Sampling) if name != "top_logprobs")
_LENGTHS = ("max_tokens", "max_completion_tokens")
_OF_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_READ = ("messages", "prompt", *_OF_TOOLS, *_SAMPLING, *_LENGTHS, "logit_bias", "response_format", "stop", "n")
_OF_SERVERS = ("model", "stream", "stream_options", "user", "metadata", "store")
_ANSWERED = "completions"
_FORMATS = {"text": None, "json_object": {"type": "object"}}
_OF_FORMATS, _OF_SCHEMAS = {"type", "json_schema"}, {"name", "description", "schema", "strict"}
_NEW_TOKENS = ("max_tokens", "max_length", "max_completion_tokens")


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a text is generated and when it ends, apart from the end tokens of the model.

    `sampling` has the seed of the call, from which each text gets its own. A text has `max_new_tokens` at most, fewer
    at the end of the context, and is cut before the `stop` strings. `exact`: see `skipdecode.engine.Request`.
    """

    sampling: Sampling
    max_new_tokens: int
    stop: StopStrings = field(default_factory=StopStrings)
    exact: bool = True

    def for_record(self, record: Record, grammars: Grammars) -> Decoding:
        """Return the settings of one record, with random numbers by its index, and with what it asks for.

        Raises UsageError: the model cannot do what the record asks for.
        """
        settings = record.settings
        if settings is None:
            return replace(self, sampling=self.sampling.for_row(record.index))
        own = dict(settings.sampling)
        index = 0 if "seed" in own else record.index  # its own seed: as in the server
        if settings.json_schema is not None:
            own["grammar"] = grammars.compile("json", settings.json_schema)
        form = call_form(settings, grammars.tokenizer)
        if form is not None and settings.calling.demanded:
            words = grammars.tokenizer.added_tokens_decoder
            own["grammar"] = grammars.compile("lark", form.grammar(settings.calling, words))
        sampling = replace(self.sampling, **own).for_row(index)
        most, stop = settings.max_new_tokens or self.max_new_tokens, settings.stop
        return replace(self, sampling=sampling, max_new_tokens=most, stop=self.stop if stop is None else stop)


def call_form(settings: OwnSettings | None, tokenizer: Any) -> CallForm | None:
    """Return how the model calls the tools of a line of OpenAI's batches; None without tools or a known form.

    Raises UsageError: the line demands a call, and there is no known form.
    """
    if settings is None or not settings.calling.shown:
        return None
    form = CallForm.of(tokenizer, settings.calling.shown)
    if form is None and settings.calling.demanded:
        raise UsageError("tool_choice demands a call, which this model's chat template has no known form for")
    return form


@dataclass(frozen=True)
class Output:
    """The output of one prompt.

    Parameters
    ----------
    source : EncodedPrompt
        The prompt with its record.
    prompt : str
        The prompt as it was tokenized, with its template or chat template.
    text : str
        The output without the stop string.
    tokens : list of int
        The new tokens, with the end token.
    finish_reason : {"eos", "length", "stop", "error"} or None
        An end token, `max_new_tokens` (or the end of the context), a stop string, or a schema that takes too much work.
        None: the prompt cannot be used (`error`); only `LLM.iterate` gives such outputs.
    """

    source: EncodedPrompt = field(repr=False, compare=False)
    prompt: str = field(init=False)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", self.source.text)  # a field, as outputs are shown and compared with it

    @property
    def index(self) -> int:
        """The number of the prompt among those of the call or file, from 0."""
        return self.source.record.index

    @property
    def error(self) -> str | None:
        """Why the prompt cannot be used."""
        return self.source.error

    def to_record(self, prompt: str | None = None) -> dict[str, Any]:
        """Return the output record, or the error of the record that cannot be used. JSON-ready.

        `prompt`: what it repeats of the prompt.
        """
        record = self.source.record
        if self.error is not None:  # its line number might be the id of another record
            return {"id": record.id if record.has_id else None, "line": record.line, "error": self.error}
        repeated = {} if prompt is None else {"prompt": prompt}
        found = {"text": self.text, "new_tokens": len(self.tokens), "finish_reason": self.finish_reason}
        return {"id": record.id, **repeated, **found}

    def to_batch_line(self, model: str, tokenizer: Any) -> dict[str, Any]:
        """Return the line of the record in a result of OpenAI's batches; calls of its tools are taken out of the text.

        `model` is the model's name.
        """
        record, number = self.source.record, self.index
        named = {"id": f"batch_req_{number}", "custom_id": str(record.id) if record.has_id else None}
        if self.finish_reason in (None, "error"):
            why = f"line {record.line}: {self.error or 'the JSON schema takes too much work'}"
            return {**named, "response": None, "error": {"code": "invalid_request", "message": why}}
        counts = len(self.source.token_ids), len(self.tokens)
        body = {
            "id": f"cmpl-{number}",
            "object": "text_completion" if isinstance(record.prompt, str) else "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [self._choice(tokenizer)],
            "usage": {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)},
        }
        return {**named, "response": {"status_code": 200, "request_id": f"req_{number}", "body": body}, "error": None}

    def _choice(self, tokenizer: Any) -> dict[str, Any]:
        """The answer in OpenAI's form."""
        record, text, calls = self.source.record, self.text, list[dict[str, Any]]()
        if record.settings is not None and (form := call_form(record.settings, tokenizer)) is not None:
            text, calls = CallReader(form, record.settings.calling).push(text, last=True)
        ended = "tool_calls" if calls else "stop"
        choice = {"index": 0, "logprobs": None, "finish_reason": "length" if self.finish_reason == "length" else ended}
        if isinstance(record.prompt, str):
            return {**choice, "text": text}
        message = {"role": "assistant", "content": None if calls and not text else text}
        return {**choice, "message": {**message, **({"tool_calls": calls} if calls else {})}}


def check_options(given: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that `LLM.generate` does not have."""
    known = {field.name for field in fields(Sampling)} - {"top_logprobs", "grammar"}
    unknown = next((name for name in given if name not in known), None)
    if unknown == "top_logprobs":
        raise UsageError("top_logprobs: outputs have no log-probabilities; skipdecode serve and skipdecode.engine do")
    if unknown is not None:
        hint = " (did you mean 'max_new_tokens'?)" if unknown in _NEW_TOKENS else near(unknown, [*known, *OPTIONS])
        accepted = ", ".join([*OPTIONS, *sorted(known)])
        raise UsageError(f"generate has no option {unknown!r}{hint}; accepted are {accepted}")


def positive(name: str, value: Any) -> int:
    """Return `value` if it is a whole number above 0; raises OptionError."""
    value = unwrapped(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(name, value, "a whole number, 1 or more")
    return value


# ---------------------------------------------------------------------- lines of OpenAI's batches


def prompt_reader(template: PromptTemplate) -> ReadRow:
    """Return the reader of rows to generate from: the template's, and for lines of OpenAI's batches that of bodies."""

    def read(record: Record, row: Mapping[str, Any]) -> Record:
        body = row.get("body") if template.shape is None else None
        if not isinstance(body, dict):
            return template.prompt(record, row)
        if not str(url := row.get("url", _ANSWERED)).endswith(_ANSWERED):
            raise DataError(f"url {url!r} is not answered: give /v1/chat/completions or /v1/completions")
        rest, taken = body.keys() - {*_READ, *_OF_SERVERS}, _READ[: 2 if body.get("tool_choice") == "none" else 3]
        fields = {name: body[name] for name in taken if name in body} | {f"body.{x}": body[x] for x in sorted(rest)}
        record = template.prompt(record, fields)
        return replace(record, settings=_settings_of(body), guessed=BATCH_LINES)

    return read


def _settings_of(body: Mapping[str, Any]) -> OwnSettings:
    """The settings of a body; raises DataError for a value that is not accepted."""
    given = {name: value for name, value in body.items() if value is not None}
    drawn = {name: given[name] for name in _SAMPLING if name in given}
    drawn |= {"top_k": 0} if drawn.get("top_k") == -1 else {}  # vLLM's "all"
    try:
        for name in filter(given.__contains__, _LENGTHS):
            if (accepted := kinds(Request)["max_new_tokens"].refuses(given[name])) is not None:
                raise OptionError(name, given[name], accepted)
        if given.get("n", 1) != 1:
            raise OptionError("n", given["n"], "1, or one line for each answer")
        if isinstance(bias := given.get("logit_bias", {}), Mapping):  # JSON's names are texts
            bias = {int(name) if str(name).isdecimal() else name: value for name, value in bias.items()}
        drawn["logit_bias"] = bias
        Sampling(**drawn)
        schema, stop = schema_of(given.get("response_format", {"type": "text"})), given.get("stop")
        calling = ToolChoice()
        if "messages" in given and any(name in given for name in _OF_TOOLS[:2]):
            parallel, tools = given.get("parallel_tool_calls", True), chat_fields(body, chat=True).get("tools", ())
            calling = ToolChoice.of(tools, given.get("tool_choice", "auto"), several=parallel is not False)
            if calling.shown and schema is not None:
                raise OptionError("response_format", given["response_format"], "text beside tools")
        stops = None if stop is None else StopStrings([stop] if isinstance(stop, str) else stop)
    except UsageError as e:
        raise DataError(f"body.{e}") from None
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    return OwnSettings(drawn, most, stops, schema, calling)


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
