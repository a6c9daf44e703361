"""The output of a prompt, and its forms in a file: a record, or the answer to a line of OpenAI's batches."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from skipdecode.data.prompts import EncodedPrompt
from skipdecode.engine.requests import FinishReason
from skipdecode.generation.calls import CallReader
from skipdecode.generation.decoding import call_form
from skipdecode.generation.stats import RunStats


@dataclass(frozen=True)
class Output:
    """The output of one prompt.

    Parameters
    ----------
    source : EncodedPrompt
        The prompt with its record.
    text : str
        The output without the stop string.
    tokens : list of int
        The new tokens, with the end token.
    finish_reason : {"eos", "length", "stop", "error"} or None
        An end token, `max_new_tokens` (or the end of the context), a stop string, or a schema that takes too much work.
        None: the prompt cannot be used (`error`); only `LLM.iterate` gives such outputs.
    """

    source: EncodedPrompt = field(repr=False)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def index(self) -> int:
        """The number of the prompt among those of the call or file, from 0."""
        return self.source.record.index

    @property
    def prompt(self) -> str:
        """The prompt as it was tokenized, with its template or chat template."""
        return self.source.text

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
        if (form := call_form(record, tokenizer)) is not None:
            text, calls = CallReader(form, record.asked["calling"]).push(text, last=True)
        ended = "tool_calls" if calls else "stop"
        choice = {"index": 0, "logprobs": None, "finish_reason": "length" if self.finish_reason == "length" else ended}
        if isinstance(record.prompt, str):
            return {**choice, "text": text}
        message = {"role": "assistant", "content": None if calls and not text else text}
        return {**choice, "message": {**message, **({"tool_calls": calls} if calls else {})}}


class Outputs(list[Output]):
    """The outputs of a call, in the order of its prompts.

    Attributes
    ----------
    stats : RunStats
        The statistics of the call.
    """

    stats: RunStats
