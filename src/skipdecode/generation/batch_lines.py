"""Lines of OpenAI's batches: what the body of a line asks for, and the line of its answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from skipdecode.common.options import kinds
from skipdecode.common.types import Tokenizer
from skipdecode.data.chats import ToolChoice
from skipdecode.data.messages import chat_fields
from skipdecode.data.records import ReadRow, Record, RecordSettings
from skipdecode.data.stopping import StopStrings
from skipdecode.data.template import PromptTemplate
from skipdecode.engine.requests import Sampling
from skipdecode.errors import DataError, OptionError, UsageError
from skipdecode.generation.calls import Call, CallReader, call_form
from skipdecode.generation.decoding import Output, positive

_NAME = "OpenAI's batches"
_SAMPLING = tuple(name for name in kinds(Sampling) if name != "top_logprobs")
_LENGTHS = ("max_tokens", "max_completion_tokens")
_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_PROMPTS = ("messages", "prompt")
_FOLLOWED = (*_PROMPTS, *_TOOLS, *_SAMPLING, *_LENGTHS, "min_tokens", "logit_bias", "response_format", "stop", "n")
_FOR_SERVERS = ("model", "stream", "stream_options", "user", "metadata", "store")
_ANSWERED = "completions"  # the end of a path
_FORMATS = {"text": None, "json_object": {"type": "object"}}
_FORMAT_FIELDS, _SCHEMA_FIELDS = {"type", "json_schema"}, {"name", "description", "schema", "strict"}


def prompt_reader(template: PromptTemplate) -> ReadRow:
    """Return the reader of rows to generate from: the template's, and for lines of OpenAI's batches that of bodies."""

    def read(record: Record, row: Mapping[str, Any]) -> Record:
        body = row.get("body") if template.shape is None else None
        if not isinstance(body, dict):
            return template.with_prompt(record, row)
        if not str(url := row.get("url", _ANSWERED)).endswith(_ANSWERED):
            raise DataError(f"url {url!r} is not answered: give /v1/chat/completions or /v1/completions")
        unknown = body.keys() - {*_FOLLOWED, *_FOR_SERVERS}
        names = _PROMPTS if body.get("tool_choice") == "none" else (*_PROMPTS, "tools")
        fields = {name: body[name] for name in names if name in body}
        fields |= {f"body.{name}": body[name] for name in sorted(unknown)}
        record = template.with_prompt(record, fields, keep_answer=True)
        return replace(record, settings=_settings_of(body), guessed_fields=_NAME)

    return read


def _settings_of(body: Mapping[str, Any]) -> RecordSettings:
    """Read the settings of a body; raises DataError for a value that is not accepted."""
    fields = {name: value for name, value in body.items() if value is not None}
    sampling = {name: fields[name] for name in _SAMPLING if name in fields}
    if sampling.get("top_k") == -1:  # vLLM's "all"
        sampling["top_k"] = 0
    if "min_tokens" in fields:  # vLLM's name
        sampling["min_new_tokens"] = fields["min_tokens"]
    try:
        _check_numbers(fields)
        if isinstance(bias := fields.get("logit_bias", {}), Mapping):  # JSON's names are texts
            bias = {int(name) if str(name).isdecimal() else name: value for name, value in bias.items()}
        sampling["logit_bias"] = bias
        Sampling(**sampling)
        schema, stop = schema_of(fields.get("response_format", {"type": "text"})), fields.get("stop")
        calling = ToolChoice()
        if "messages" in fields and any(name in fields for name in _TOOLS[:2]):
            tools = chat_fields(body, chat=True).get("tools", ())
            several = fields.get("parallel_tool_calls", True)
            calling = ToolChoice.of(tools, fields.get("tool_choice", "auto"), several=several)
            if calling.shown and schema is not None:
                raise OptionError("response_format", fields["response_format"], "text beside tools")
        stops = None if stop is None else StopStrings([stop] if isinstance(stop, str) else stop)
    except UsageError as e:
        raise DataError(f"body.{e}") from None
    max_new_tokens = fields.get("max_completion_tokens", fields.get("max_tokens"))
    return RecordSettings(sampling, max_new_tokens, stops, schema, calling)


def _check_numbers(fields: Mapping[str, Any]) -> None:
    """Raise OptionError for a number of tokens, answers or calls that is not accepted."""
    for name in filter(fields.__contains__, _LENGTHS):
        positive(name, fields[name])
    if (count := fields.get("n", 1)) is True or count != 1:
        raise OptionError("n", count, "1, or one line for each answer")
    if not isinstance(several := fields.get("parallel_tool_calls", True), bool):
        raise OptionError("parallel_tool_calls", several, "true or false")


def schema_of(response_format: object) -> Mapping[str, object] | None:
    """Return the JSON schema of OpenAI's `response_format`, None for text; raises OptionError for what is not known."""
    fields: Mapping[str, object] = response_format if isinstance(response_format, Mapping) else {}
    kind, named = fields.get("type"), fields.get("json_schema")
    if fields.keys() <= _FORMAT_FIELDS:
        if named is None and isinstance(kind, str) and kind in _FORMATS:
            return _FORMATS[kind]
        if kind == "json_schema" and isinstance(named, Mapping) and named.keys() <= _SCHEMA_FIELDS:
            schema = named.get("schema")
            if isinstance(schema, Mapping):
                return schema
    accepted = 'a type text, json_object, or {"type": "json_schema", "json_schema": {"schema": {...}}}'
    raise OptionError("response_format", response_format, accepted)


def answer_line(output: Output, model: str, tokenizer: Tokenizer) -> dict[str, object]:
    """Make the line of a record in a result of OpenAI's batches; calls of its tools are taken out of the text.

    `model` is the model's name.
    """
    record, number = output.source.record, output.index
    names = {"id": f"batch_req_{number}", "custom_id": str(record.id) if record.has_id else None}
    if output.finish_reason in (None, "error"):
        message = f"line {record.line}: {output.error or 'the JSON schema takes too much work'}"
        return {**names, "response": None, "error": {"code": "invalid_request", "message": message}}
    prompt, new = len(output.source.token_ids), len(output.tokens)
    body = {
        "id": f"cmpl-{number}",
        "object": "text_completion" if isinstance(record.prompt, str) else "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(output, tokenizer)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new},
    }
    return {**names, "response": {"status_code": 200, "request_id": f"req_{number}", "body": body}, "error": None}


def _choice(output: Output, tokenizer: Tokenizer) -> dict[str, object]:
    """Make the only choice of an answer."""
    settings, text, calls = output.source.record.settings, output.text, list[Call]()
    if settings is not None and (form := call_form(settings, tokenizer)) is not None:
        text, calls = CallReader(form, settings.calling).push(text, last=True)
    finish_reason = "tool_calls" if calls else "stop"
    if output.finish_reason == "length":
        finish_reason = "length"
    choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
    if isinstance(output.source.record.prompt, str):
        return choice | {"text": text}
    message: dict[str, object] = {"role": "assistant", "content": None if calls and not text else text}
    return choice | {"message": message | ({"tool_calls": calls} if calls else {})}
