"""From rows to token ids: chat template, tokenizer, and what the context has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skipdecode.data.records import Message, Record
from skipdecode.errors import UsageError

__all__ = ["EncodedPrompt", "PromptEncoder", "context_length"]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A row ready for the model, or what is wrong with it.

    Parameters
    ----------
    record : Record
        The row it came from.
    text : str
        What was tokenised: the prompt, or the chat as the template renders it.
    token_ids : list of int
        Empty if there is an error.
    room : int or None
        Tokens that the context has room for after the prompt; None without a limit.
    error : str, optional
        What is wrong with the row.
    """

    record: Record
    text: str
    token_ids: list[int]
    room: int | None
    error: str | None = None


class PromptEncoder:
    """Turns rows into token ids.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    context : int or None
        Tokens the model can see at once (`context_length`).
    chat : bool
        Put plain prompts into the chat template as a user's message. Rows that are chats always go through it.
    system : str, optional
        A system message in front of every chat that has none.

    Raises
    ------
    UsageError
        `chat` is asked for and the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, context: int | None, *, chat: bool = False, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self._chat = chat
        self._system = system
        if chat and tokenizer.chat_template is None:
            raise UsageError("the model's tokenizer has no chat template: give --no-chat and no --system")

    def encode(self, records: Sequence[Record]) -> list[EncodedPrompt]:
        """One result for each row, in their order; an error stays with its row."""
        results: dict[int, EncodedPrompt] = {}
        texts: dict[bool, list[tuple[Record, str]]] = {False: [], True: []}
        for record in records:
            if record.error is not None:
                results[record.index] = EncodedPrompt(record, "", [], None, record.error)
                continue
            is_chat = self._chat or not isinstance(record.prompt, str)
            try:
                text = self._rendered(record.prompt) if is_chat else str(record.prompt)
                texts[is_chat].append((record, text))
            except _TemplateError as e:
                results[record.index] = EncodedPrompt(record, "", [], None, str(e))
        for is_chat, pairs in texts.items():
            if pairs:
                # A rendered chat holds its special tokens already.
                ids = self._tokenizer([t for _, t in pairs], add_special_tokens=not is_chat, verbose=False).input_ids
                for (record, text), row in zip(pairs, ids, strict=True):
                    results[record.index] = self._checked(record, text, row)
        return [results[record.index] for record in records]

    def _rendered(self, prompt: str | list[Message]) -> str:
        if self._tokenizer.chat_template is None:
            raise _TemplateError("the row is a chat, but the model's tokenizer has no chat template")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as e:  # A template is a program of the checkpoint's: it may raise anything.
            raise _TemplateError(f"the chat template refuses the row: {' '.join(str(e).split())}") from e

    def _checked(self, record: Record, text: str, token_ids: list[int]) -> EncodedPrompt:
        room = None if self._context is None else self._context - len(token_ids)
        error = None
        if not token_ids:
            error = "the prompt has no token"
        elif room is not None and room < 1:
            error = (
                f"the prompt has {len(token_ids)} tokens: the model's context of {self._context} has no room for more"
            )
        return EncodedPrompt(record, text, token_ids if error is None else [], room, error)


def context_length(model: Any) -> int | None:
    """Tokens that the model's positions reach; None if its config sets no limit."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


class _TemplateError(Exception):
    pass
