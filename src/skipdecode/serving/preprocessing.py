"""From a validated request to a ticket: token ids, limits, schedule, sampling. Knows nothing about HTTP."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from skipdecode.data.prompts import EncodedPrompt, PromptEncoder
from skipdecode.data.records import Record
from skipdecode.engine.requests import Request, Sampling, row_seed
from skipdecode.serving.catalog import Catalog
from skipdecode.serving.errors import ApiError
from skipdecode.serving.limits import Limits
from skipdecode.serving.protocol import ChatRequest, CompletionRequest, GenerationRequest, Message
from skipdecode.serving.request_state import Ticket

__all__ = ["Intake"]

_COMPLETION_TOKENS = 16  # OpenAI's default
_LEAST_TEMPERATURE = 0.01  # below, the likeliest token wins, and logits divided by it would overflow


class Intake:
    """Makes tickets.

    Its methods take time with long prompts: call them outside of the event loop, one at a time.

    Parameters
    ----------
    tokenizer : transformers tokenizer
        Copied: tickets take one copy to the worker's thread, and prompts are encoded with another.
    context : int or None
        Tokens that the model can see at once.
    vocab_size : int
        Tokens that the model knows.
    end_tokens : sequence of int
        A choice ends after any of them.
    catalog : Catalog
    limits : Limits
    """

    def __init__(
        self,
        tokenizer: Any,
        context: int | None,
        vocab_size: int,
        end_tokens: Iterable[int],
        catalog: Catalog,
        limits: Limits,
    ) -> None:
        self.context = context
        self._decoding = copy.deepcopy(tokenizer)
        encoding = copy.deepcopy(tokenizer)
        self._encoder = PromptEncoder(encoding, context)
        self._unbounded = PromptEncoder(encoding, None)
        self._vocab_size = vocab_size
        self._end_tokens = frozenset(end_tokens)
        self._catalog = catalog
        self._limits = limits

    def ticket(self, request: GenerationRequest, arrived: float) -> Ticket:
        """A ticket for a request that came at `arrived`, on `time.perf_counter`'s clock.

        Raises
        ------
        ApiError
            It asks for what the server cannot give.
        """
        asked = request.extension
        plan = self._catalog.plan(asked.schedule, asked.budget)
        copies = request.n or 1
        self._check_choices(request, copies)
        prompts = self._prompts(request)
        requests = []
        for number, prompt in enumerate(prompts):
            tokens = self._new_tokens(request, len(prompt))
            for copy_number in range(copies):
                sampling = self._sampling(request, number * copies + copy_number)
                requests.append(Request(tuple(prompt), tokens, sampling, self._end_tokens))
        return Ticket(
            requests,
            sum(map(len, prompts)),
            plan,
            self._decoding,
            request.stops,
            trace=asked.trace,
            arrived=arrived,
            deadline=arrived + self._limits.max_seconds,
            max_unread=self._limits.max_unread_tokens,
        )

    def tokens(self, prompt: str | list[Message]) -> list[int]:
        """Token ids of a prompt or a chat, of any length."""
        encoded = self._encode(prompt, self._unbounded)
        if encoded.error is not None:
            raise ApiError(400, "invalid_value", encoded.error, "prompt" if isinstance(prompt, str) else "messages")
        return encoded.token_ids

    # ------------------------------------------------------------------ parts

    def _check_choices(self, request: GenerationRequest, copies: int) -> None:
        prompts = len(request.prompts()) if isinstance(request, CompletionRequest) else 1
        most = self._limits.max_choices
        if prompts * copies > most:
            field = "n" if copies > most or prompts == 1 else "prompt"
            message = f"{prompts} prompts with n={copies} are too many choices: at most {most} together"
            raise ApiError(400, "invalid_value", message, field)

    def _prompts(self, request: GenerationRequest) -> list[list[int]]:
        if isinstance(request, ChatRequest):
            return [self._checked(self._encode(request.messages, self._encoder), "messages")]
        found: list[list[int]] = []
        if not isinstance(request, CompletionRequest):
            return found
        for prompt in request.prompts():
            if isinstance(prompt, str):
                found.append(self._checked(self._encode(prompt, self._encoder), "prompt"))
            else:
                self._check_ids(prompt)
                self._check_length(len(prompt), "prompt")
                found.append(prompt)
        return found

    def _encode(self, prompt: str | list[Message], encoder: PromptEncoder) -> EncodedPrompt:
        row = prompt if isinstance(prompt, str) else [message.plain() for message in prompt]
        return encoder.encode([Record(0, 0, 0, row)])[0]

    def _checked(self, encoded: EncodedPrompt, field: str) -> list[int]:
        if encoded.error is not None:
            code = "context_length_exceeded" if encoded.room is not None and encoded.room < 1 else "invalid_value"
            raise ApiError(400, code, encoded.error, field)
        self._check_length(len(encoded.token_ids), field)
        return encoded.token_ids

    def _check_ids(self, tokens: list[int]) -> None:
        wrong = next((t for t in tokens if t >= self._vocab_size), None)
        if wrong is not None:
            message = f"token {wrong} is outside the model's vocabulary of {self._vocab_size}"
            raise ApiError(400, "invalid_value", message, "prompt")

    def _check_length(self, tokens: int, field: str) -> None:
        most = self._limits.max_prompt_tokens
        if tokens > most:
            message = f"the prompt has {tokens} tokens: this server takes {most}"
            raise ApiError(400, "context_length_exceeded", message, field)

    def _new_tokens(self, request: GenerationRequest, prompt_tokens: int) -> int:
        room = self._limits.max_new_tokens
        if self.context is not None:
            room = min(room, self.context - prompt_tokens)
        field = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
        if room < 1:
            message = (
                f"the prompt has {prompt_tokens} tokens: the model's context of {self.context} has no room for more"
            )
            raise ApiError(400, "context_length_exceeded", message, "prompt")
        asked = request.new_tokens
        if asked is None:
            return min(room, _COMPLETION_TOKENS) if isinstance(request, CompletionRequest) else room
        if asked > self._limits.max_new_tokens:
            message = f"{field}={asked} is not accepted: give 1 to {self._limits.max_new_tokens}"
            raise ApiError(400, "invalid_value", message, field)
        if asked > room:
            message = f"{field}={asked} does not fit: the prompt has {prompt_tokens} of {self.context} tokens"
            raise ApiError(400, "context_length_exceeded", message, field)
        return asked

    def _sampling(self, request: GenerationRequest, index: int) -> Sampling:
        bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
        wrong = next((t for t in bias if t >= self._vocab_size), None)
        if wrong is not None:
            message = f"token {wrong} is outside the model's vocabulary of {self._vocab_size}"
            raise ApiError(400, "invalid_value", message, "logit_bias")
        temperature = 1.0 if request.temperature is None else request.temperature
        return Sampling(
            temperature=temperature if temperature >= _LEAST_TEMPERATURE else 0.0,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=None if request.seed is None else row_seed(request.seed, index),
            logit_bias=bias,
            top_logprobs=request.top_logprobs_wanted or 0,
        )
