"""How the text of a prompt is generated (`Decoding`), and what comes of it (`Output`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TypedDict

from skipdecode.common.options import kinds, near
from skipdecode.common.plain import unwrapped
from skipdecode.data.prompts import EncodedPrompt
from skipdecode.data.records import Record
from skipdecode.data.stopping import StopStrings
from skipdecode.engine.requests import FinishReason, Request, Sampling
from skipdecode.errors import OptionError, UsageError
from skipdecode.generation.calls import call_form
from skipdecode.generation.grammar import Grammars

OPTIONS = ("max_new_tokens", "schedule", "stop", "template", "exact", "json_schema")
"""The options of `skipdecode.LLM.generate` beside the fields of `Sampling`."""
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
        sampling = replace(self.sampling, **settings.sampling)
        if settings.json_schema is not None:
            sampling = replace(sampling, grammar=grammars.compile("json", settings.json_schema))
        form = call_form(settings, grammars.tokenizer)
        if form is not None and settings.calling.demanded:
            source = form.grammar(settings.calling, grammars.tokenizer)
            sampling = replace(sampling, grammar=grammars.compile("lark", source))
        index = 0 if "seed" in settings.sampling else record.index  # its own seed: as in the server
        return replace(
            self,
            sampling=sampling.for_row(index),
            max_new_tokens=settings.max_new_tokens or self.max_new_tokens,
            stop=self.stop if settings.stop is None else settings.stop,
        )


class OutputRecord(TypedDict, total=False):
    """An output as a JSON object: of a prompt that cannot be used, `id`, `line` and `error`."""

    id: str | int | None
    prompt: str
    text: str
    new_tokens: int
    finish_reason: FinishReason | None
    line: int
    error: str


@dataclass(frozen=True)
class Output:
    """The output of one prompt."""

    source: EncodedPrompt = field(repr=False, compare=False)  # the prompt with its record
    prompt: str = field(init=False)  # as it was tokenized, with its template or chat template
    text: str = ""  # without the stop string
    tokens: list[int] = field(default_factory=list)  # with the end token
    # An end token, `max_new_tokens` (or the end of the context), a stop string, or a schema that takes too much work.
    # None: the prompt cannot be used (`error`); only `LLM.iterate` gives such outputs.
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

    def to_record(self, prompt: str | None = None) -> OutputRecord:
        """Return the output record, or the error of the record that cannot be used; `prompt`: the prompt to show."""
        record = self.source.record
        if self.error is not None:  # its line number might be the id of another record
            return {"id": record.id if record.has_id else None, "line": record.line, "error": self.error}
        shown: OutputRecord = {"id": record.id} if prompt is None else {"id": record.id, "prompt": prompt}
        return {**shown, "text": self.text, "new_tokens": len(self.tokens), "finish_reason": self.finish_reason}


def check_options(names: Iterable[str]) -> None:
    """Raise UsageError for an option that `LLM.generate` does not have."""
    known = {field.name for field in fields(Sampling)} - {"top_logprobs", "grammar"}
    unknown = next((name for name in names if name not in known), None)
    if unknown == "top_logprobs":
        raise UsageError("top_logprobs: outputs have no log-probabilities; skipdecode serve and skipdecode.engine do")
    if unknown is not None:
        hint = " (did you mean 'max_new_tokens'?)" if unknown in _NEW_TOKENS else near(unknown, [*known, *OPTIONS])
        accepted = ", ".join([*OPTIONS, *sorted(known)])
        raise UsageError(f"generate has no option {unknown!r}{hint}; accepted are {accepted}")


def positive(name: str, value: object) -> int:
    """Return `value` if it is a whole number above 0; raises OptionError."""
    number: int = unwrapped(value)
    if (accepted := kinds(Request)["max_new_tokens"].refuses(number)) is not None:
        raise OptionError(name, number, accepted)
    return number
