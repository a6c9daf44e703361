"""From records to the token ids of their prompts, as in generation.

Every record that cannot be used is reported with its line; the caller refuses the file or leaves the record out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from skipdecode.common.jsonl import Fields
from skipdecode.common.progress import note
from skipdecode.common.types import PretrainedConfig, PreTrainedModel, Tokenizer
from skipdecode.data.chats import chat_fault, checked_variables, render_chat, token_ids, unused_fields, unused_roles
from skipdecode.data.messages import checked_text
from skipdecode.data.records import Record
from skipdecode.data.template import PromptTemplate
from skipdecode.errors import DataError, UsageError


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A record as token ids, or its error.

    `text` is the text that was tokenized: the prompt, or the rendered chat. `token_ids` are empty if there is an error.
    `room` is the number of tokens that fit into the context after the prompt; None without a limit.
    """

    record: Record
    text: str
    token_ids: list[int]
    room: int | None
    error: str | None = None


_PLAIN = PromptTemplate()


class PromptEncoder:
    """Turns records into token ids.

    `context`: tokens of the model's context (`context_length`): a prompt must leave room for one more. `template`: of
    the records: whether plain prompts are chats (which has been decided), their system message, and which field may be
    cut. Chats always go through the chat template. Default: plain prompts. `vocabulary`: tokens of the model
    (`vocabulary_size`): prompts with others are refused. Default: any. `noted`: fields that a note has named because
    they are not in the prompts: each is named once. Default: none yet. `variables`: of the chat template, for every
    chat.

    Raises UsageError: the template is for chats and the tokenizer has no chat template, or it does not use a variable;
    ModelLoadError: the template is for chats and the chat template is no valid program; `encode` raises it at the first
    chat.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: int | None,
        template: PromptTemplate = _PLAIN,
        *,
        vocabulary: int | None = None,
        noted: set[str] | None = None,
        variables: Fields | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._context = context
        self._noted = set() if noted is None else noted
        self._template = template
        self._variables = checked_variables(tokenizer, variables)
        if template.chat and (fault := chat_fault(tokenizer)) is not None:
            raise UsageError(f"{fault}: give prompts without chat and without a system message")

    def encode(self, records: Sequence[Record], most: int | None = None) -> list[EncodedPrompt]:
        """One result for each record, in order; errors are part of the results.

        In a prompt longer than `most` tokens, or than its template's limit, the field that may be cut loses its end. A
        prompt without such a field, or too long without the field, is not changed.
        """
        prompts = [self._rendered(record) for record in records]
        for is_chat in (False, True):
            texts = (n for n, p in enumerate(prompts) if p.error is None and not p.record.token_ids)
            rows = [n for n in texts if self._is_chat(records[n]) == is_chat]
            # A rendered chat already has its special tokens.
            ids = token_ids(self._tokenizer, [prompts[n].text for n in rows], special=not is_chat) if rows else []
            for number, row in zip(rows, ids, strict=True):
                prompts[number] = self._checked(records[number], *self._cut(prompts[number], row, most))
        return prompts

    def stream(self, records: Iterable[Record], at_once: int) -> Iterator[EncodedPrompt]:
        """Encode records as they are taken, so many together."""
        remaining = iter(records)
        while window := list(islice(remaining, at_once)):
            yield from self.encode(window)

    def _is_chat(self, record: Record) -> bool:
        """Whether a record goes into the chat template: a prompt of OpenAI's completions does not by itself."""
        as_it_is = record.settings is not None and self._template.text is None
        return not isinstance(record.prompt, str) or bool(self._template.chat and not as_it_is)

    def _rendered(self, record: Record) -> EncodedPrompt:
        """The text of a record that is still to be tokenized; of a record of token ids, the whole prompt."""
        if record.token_ids:
            prompt = self._checked(record, "", list(record.token_ids))
            return replace(prompt, text=self._tokenizer.decode(prompt.token_ids))
        text, error = "", record.error
        if error is None:
            try:
                text = checked_text("the rendered prompt", self._text(record))
            except DataError as e:
                error = str(e)
        return EncodedPrompt(record, text, [], None, error)

    def _text(self, record: Record) -> str:
        prompt, extra = record.prompt, record.for_chat
        if isinstance(prompt, str) and not self._is_chat(record):
            self._note_unused({*record.left_out, *map(repr, extra)})
            return prompt
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise DataError("the record is a chat, but the model's tokenizer has no chat template")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        unused = set[str]()
        if messages[0]["role"] in ("system", "developer"):
            unused = {"system"} & extra.keys()
        elif (system := extra.get("system", self._template.system)) is not None:
            messages = [{"role": "system", "content": system}, *messages]
        tools = extra.get("tools", ())
        text = render_chat(self._tokenizer, messages, tools, variables=self._variables)
        unused |= unused_fields(self._tokenizer, messages, tools, text, self._variables)
        roles = unused_roles(self._tokenizer, messages, tools, self._variables)
        self._note_unused({*record.left_out, *map(repr, unused), *(f"messages of the role {role!r}" for role in roles)})
        return text

    def _note_unused(self, left_out: set[str]) -> None:
        """Name fields of records that are not in the prompts, each once."""
        if new := sorted(left_out - self._noted):
            self._noted.update(new)
            note(f"fields of the records that are not in the prompts: {', '.join(new)}")

    def _checked(self, record: Record, text: str, token_ids: list[int]) -> EncodedPrompt:
        room = None if self._context is None else self._context - len(token_ids)
        error = None
        if not token_ids:
            error = "the prompt has no token"
        elif room is not None and room < 1:
            error = (
                f"the prompt has {len(token_ids)} tokens: the model's context of {self._context} has no room for more"
            )
        elif (fault := outside(token_ids, self._tokenizer, self._vocabulary)) is not None:
            error = f"the prompt has a {fault}"
        return EncodedPrompt(record, text, token_ids if error is None else [], room, error)

    def _cut(self, prompt: EncodedPrompt, ids: list[int], most: int | None) -> tuple[str, list[int]]:
        """The prompt's text and tokens; if it is too long, the field that may be cut is shortened."""
        template, values = self._template, prompt.record.values  # no values: a chat, which no template made
        if template.truncate is None or template.truncate not in values:
            return prompt.text, ids
        most = min(n for n in (template.max_prompt_tokens, most) if n is not None)
        if len(ids) <= most:
            return prompt.text, ids
        value = values[template.truncate]
        encoded = self._tokenizer(value, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ends = encoded["offset_mapping"]
        keep, text, shorter = len(ends), prompt.text, ids
        while len(shorter) > most:
            # Tokens may merge across the cut, so one round may not be enough.
            keep -= len(shorter) - most
            if keep < 1:
                return prompt.text, ids
            cut = {**values, template.truncate: value[: ends[keep - 1][1]]}
            text = self._text(replace(prompt.record, prompt=template.render(cut)))
            (shorter,) = token_ids(self._tokenizer, [text], special=not template.chat)
        return text, shorter


def outside(token_ids: Iterable[int], tokenizer: Tokenizer, vocabulary: int | None) -> str | None:
    """The first token that a model of `vocabulary` tokens does not know, in words; None if it knows all."""
    token = next((token for token in token_ids if vocabulary is not None and not 0 <= token < vocabulary), None)
    if token is None:
        return None
    word = tokenizer.convert_ids_to_tokens(token) if 0 <= token < len(tokenizer) else None
    return f"token {token} ({word!r}) outside the model's vocabulary of {vocabulary} tokens"


def context_length(config: PretrainedConfig) -> int | None:
    """Tokens of the context of a model with this transformers config; None without a limit."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of a causal LM's token embedding: tokens have ids below this number."""
    return int(model.get_input_embeddings().weight.shape[0])


def prompt_room(context: int | None, max_new_tokens: int) -> int | None:
    """Most tokens of a prompt; None without a limit. Raises UsageError if there is no room for a prompt."""
    room = None if context is None else context - max_new_tokens
    if room is not None and room < 1:
        raise UsageError(
            f"`max_new_tokens` {max_new_tokens} leaves no room for a prompt: the model's context is {context} tokens; "
            "give fewer"
        )
    return room


def check_end_token(tokenizer: Tokenizer) -> None:
    """Raise DataError if the tokenizer has no end token."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end token, so texts would not end: name one in its tokenizer_config.json")
