"""How texts are generated: the settings of a call, and what a line of OpenAI's batches changes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from skipdecode.common.options import near
from skipdecode.common.plain import unwrapped
from skipdecode.data.records import Record
from skipdecode.data.stopping import StopStrings
from skipdecode.engine.requests import Sampling
from skipdecode.errors import OptionError, UsageError
from skipdecode.generation.calls import CallForm
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
        asked = record.asked
        own = dict(asked.get("sampling", {}))
        index = 0 if "seed" in own else record.index  # its own seed: as in the server
        if "json_schema" in asked:
            own["grammar"] = grammars.compile("json", asked["json_schema"])
        form = call_form(record, grammars.tokenizer)
        if form is not None and asked["calling"].demanded:
            words = grammars.tokenizer.added_tokens_decoder
            own["grammar"] = grammars.compile("lark", form.grammar(asked["calling"], words))
        sampling = replace(self.sampling, **own) if own else self.sampling
        most = asked.get("max_new_tokens", self.max_new_tokens)
        return replace(self, sampling=sampling.for_row(index), max_new_tokens=most, stop=asked.get("stop", self.stop))


def call_form(record: Record, tokenizer: Any) -> CallForm | None:
    """Return how the model calls the tools of a line of OpenAI's batches; None without tools or a known form.

    Raises UsageError: the line demands a call, and there is no known form.
    """
    calling = record.asked.get("calling")
    if calling is None:
        return None
    form = CallForm.of(tokenizer, calling.shown) if calling.shown else None
    if form is None and calling.demanded:
        raise UsageError("tool_choice demands a call, which this model's chat template has no known form for")
    return form


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
