"""From the body of a request to what the engine gets: prompts, ids, limits, sampling and grammar are checked, once.

Knows nothing about HTTP.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from skipdecode.common.options import kinds
from skipdecode.common.types import Tokenizer
from skipdecode.data.chats import (
    chat_fault,
    render_chat,
    template_fault,
    token_ids,
    unread_variable,
    unused_fields,
    unused_roles,
)
from skipdecode.data.messages import REASONING, checked_text, read_messages
from skipdecode.data.prompts import PromptEncoder
from skipdecode.data.stopping import StopStrings
from skipdecode.data.template import PromptTemplate
from skipdecode.engine.requests import Grammar, Request, Sampling
from skipdecode.errors import DataError, GrammarError, MissingExtraError, ModelLoadError, UsageError
from skipdecode.generation.calls import CallForm, parameters_of
from skipdecode.generation.grammar import GrammarKind, Grammars, GrammarSource
from skipdecode.schedule import Schedule
from skipdecode.serving.errors import ApiError, invalid
from skipdecode.serving.protocol import Chat, ChatRequest, CompletionRequest, GenerationRequest, Prompt
from skipdecode.serving.served_model import ServedModel

_COMPLETION_TOKENS = 16  # OpenAI's default


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """A checked request: what the engine gets for each choice, and what its answer needs."""

    requests: tuple[Request, ...]  # the copies of a prompt stand together
    copies: int  # of each prompt
    schedule: Schedule
    stops: StopStrings
    stop_tokens: frozenset[int]  # they end a text and are not in it
    calls: CallForm | None  # how the model calls tools, if there are any
    echo: bool  # whether the text begins with the prompt's
    empty: bool  # whether no new token is wanted: one is generated and dropped
    trace: bool  # whether the client wants the layers of each token

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(request.prompt) for request in self.requests[:: self.copies])


class Preprocessor:
    """Makes sequences of requests, tokens of prompts, and text of tokens.

    Its methods take time with long prompts: call them outside of the event loop, one at a time.

    Raises ModelLoadError: the tokenizer's chat template is no valid program; OptionError: it does not use a variable.
    """

    def __init__(self, model: ServedModel) -> None:
        chat_fault(model.tokenizer)  # raises at start what every chat would meet
        self._model = model
        self._tokenizer = copy.deepcopy(model.tokenizer)
        # Without the context, which binds generation and not /tokenize: `_encoded` knows it.
        self._template = model.template or PromptTemplate()
        self._templated = PromptEncoder(self._tokenizer, None, self._template, variables=model.variables)
        self._grammars = Grammars(self._tokenizer, model.vocab_size, model.end_tokens)

    def sequences_of(self, body: GenerationRequest, cache_salt: str = "") -> Sequences:
        """Check a request, and encode its prompts; `cache_salt` as in `Request`.

        Raises ApiError: it asks for what the server cannot give.
        """
        prompts = self._prompts(body)
        schedule = self._model.schedule(body.skipdecode.schedule)
        calls = self._calls(body)
        sampling = self._sampling(body, calls)
        stop_tokens = frozenset(body.stop_token_ids)
        self._check_ids(stop_tokens, "stop_token_ids")
        completion = body if isinstance(body, CompletionRequest) else None
        requests = [
            Request(
                prompt=tuple(prompt),
                max_new_tokens=self._new_tokens(body, len(prompt)),
                sampling=sampling.for_row(index),  # copies differ in their seeds
                stop_ids=stop_tokens if body.ignore_eos else self._model.end_tokens | stop_tokens,
                cache_salt=cache_salt,
                exact=body.skipdecode.exact,
                scores_prompt=completion is not None and completion.scores_prompt,
            )
            for index, prompt in enumerate(prompt for prompt in prompts for _ in range(body.n))
        ]
        return Sequences(
            requests=tuple(requests),
            copies=body.n,
            schedule=schedule,
            stops=StopStrings(body.stops) if "stop" in body.model_fields_set else self._model.stops,
            stop_tokens=stop_tokens,
            calls=calls,
            echo=completion is not None and completion.echo,
            empty=body.new_tokens == 0,
            trace=body.skipdecode.trace,
        )

    def tokens(self, prompt: Prompt, special: bool | None = None) -> list[int]:
        """Token ids of a prompt or a chat, of any length.

        `special` says whether the tokenizer adds its special tokens; by default it does, but for chats, whose template
        has them already.
        """
        if isinstance(prompt, tuple):
            return list(prompt)
        if isinstance(prompt, Chat):
            text, special = chat_text(self._tokenizer, prompt, self._model.variables), bool(special)
        else:
            text, special = prompt, special is not False
        tokens = token_ids(self._tokenizer, [text], special=special)[0]
        if not tokens:
            message = "the chat has no token: give messages with text"
            raise invalid(message if isinstance(prompt, Chat) else "the prompt has no token", _field_of(prompt))
        return tokens

    def text(self, tokens: list[int]) -> str:
        """Decode token ids, special ones included; raises ApiError for ids that the model does not know."""
        self._check_ids(tokens, "tokens")
        return str(self._tokenizer.decode(tokens))

    def _prompts(self, body: GenerationRequest) -> list[list[int]]:
        """Token ids of the prompts, each of which leaves room for an answer."""
        prompts, most = body.prompts(), self._model.limits.max_choices
        choices = len(prompts) * body.n
        if choices > most:
            field = "n" if body.n > most or len(prompts) == 1 else "prompt"
            raise invalid(f"{choices} choices (prompts times n) are too many: at most {most} together", field)
        template = self._uses_template(body, prompts)
        encoded = []
        for index, prompt in enumerate(prompts):
            try:
                encoded.append(self._encoded(prompt, template))
            except ApiError as e:
                if len(prompts) > 1:
                    e.detail = f"prompt[{index}]: {e.detail}"
                raise
        return encoded

    def _uses_template(self, body: GenerationRequest, prompts: Iterable[Prompt]) -> bool:
        """Whether texts go into the checkpoint's template."""
        template = body.skipdecode.template
        if template is None:
            return self._model.use_template
        if template and self._model.template is None:
            raise invalid("this checkpoint names no template that it was tuned on: leave it out", "skipdecode.template")
        if template and not all(isinstance(prompt, str) for prompt in prompts):
            message = "only a text goes into the checkpoint's template, no chat and no token ids: leave template out"
            raise invalid(message, "skipdecode.template")
        return template

    def _templated_tokens(self, prompt: str) -> list[int]:
        encoded = self._templated.encode([self._template.record_of(prompt)])[0]
        if encoded.error is not None:
            hint = " (in a request: skipdecode.template=false)" if prompt.strip() else ""
            raise invalid(encoded.error + hint, "prompt")
        return encoded.token_ids

    def _encoded(self, prompt: Prompt, template: bool) -> list[int]:
        """Token ids of a prompt that leaves room for an answer; with `template`, a text goes into the checkpoint's."""
        field = _field_of(prompt)
        tokens = self._templated_tokens(prompt) if template and isinstance(prompt, str) else self.tokens(prompt)
        self._check_ids(tokens, field)
        length, most, context = len(tokens), self._model.limits.max_prompt_tokens, self._model.context
        limits = [] if context is None else [f"the model's context is {context}"]
        if context is None or context > most:
            limits.insert(0, f"this server's limit is {most}")
        if length > most or (context is not None and length >= context):
            # Words by which LiteLLM knows the error.
            message = f"the prompt has {length} tokens, which exceeds the maximum number of tokens allowed: "
            raise ApiError(400, "context_length_exceeded", message + "; ".join(limits), field)
        return tokens

    def _check_ids(self, tokens: Iterable[int], field: str) -> None:
        size = self._model.vocab_size
        unknown = next((token for token in tokens if token >= size), None)
        if unknown is not None:
            raise invalid(f"token {unknown} is outside the model's vocabulary of {size}", field)

    def _new_tokens(self, body: GenerationRequest, prompt_tokens: int) -> int:
        """Most new tokens of a choice; at least 1, which the engine needs."""
        most, context = self._model.limits.max_new_tokens, self._model.context
        room = most if context is None else min(most, context - prompt_tokens)
        field = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
        new_tokens = body.new_tokens
        if new_tokens is None:
            new_tokens = min(room, _COMPLETION_TOKENS) if isinstance(body, CompletionRequest) else room
        elif new_tokens > most:
            raise invalid(f"{field}={new_tokens} is not accepted: this server's limit is {most}", field)
        elif new_tokens > room:
            message = f"this model's maximum context length is {context} tokens: {prompt_tokens} of the prompt"
            message += f" and {field}={new_tokens} are more"
            raise ApiError(400, "context_length_exceeded", message, field)
        if body.min_tokens > new_tokens:
            message = f"min_tokens={body.min_tokens} is not accepted: at most {new_tokens} tokens are generated"
            raise invalid(message, "min_tokens")
        return max(1, new_tokens)

    def _sampling(self, body: GenerationRequest, calls: CallForm | None) -> Sampling:
        bias = {int(token): value for token, value in body.logit_bias.items()}
        self._check_ids(bias, "logit_bias")
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            self._check_ids(getattr(body, name), name)
        options = {name: getattr(body, name) for name in kinds(Sampling) if name in body.model_fields_set}
        options |= {"temperature": body.temperature, "top_k": max(0, body.top_k), "logit_bias": bias}
        options |= {"grammar": self._grammar(body, calls), "top_logprobs": body.top_logprobs_wanted}
        if "min_tokens" in body.model_fields_set:
            options |= {"min_new_tokens": body.min_tokens or None, "min_length": 0}
        return replace(self._model.sampling, **options)

    def _grammar(self, body: GenerationRequest, calls: CallForm | None) -> Grammar | None:
        """Compile the grammar that the text has to fit, for `Sampling`; None without one."""
        if isinstance(body, ChatRequest) and calls is not None and body.calling.demanded:
            for index, tool in enumerate(body.calling.shown):
                if tool in body.calling.callable:  # refused by its name
                    self._compiled(f"tools.{index}.function.parameters", "json", parameters_of(tool))
            source = calls.grammar(body.calling, self._tokenizer)
            return self._compiled("tools", "lark", source)
        return None if body.grammar is None else self._compiled(*body.grammar)

    def _calls(self, body: GenerationRequest) -> CallForm | None:
        """The form in which the model calls the tools of a request; None without tools."""
        if not isinstance(body, ChatRequest) or not body.calling.shown:
            return None
        form = CallForm.of(self._tokenizer, body.calling.shown)
        if form is None:
            message = "tools are for models that write calls as Hermes, Qwen or Llama 3: leave tools out"
            raise ApiError(400, "unsupported_field", message, "tools")
        return form

    def _compiled(self, field: str, kind: GrammarKind, source: GrammarSource) -> Grammar | None:
        try:
            return self._grammars.compile(kind, source)
        except GrammarError as e:
            param = (field + e.path.replace("/", "."))[:100]
            raise invalid(f"{field} is not accepted: {e}", param) from None
        except (MissingExtraError, UsageError) as e:
            raise ApiError(400, "unsupported_field", str(e), field) from None


def _field_of(prompt: Prompt) -> str:
    """The name under which it was sent."""
    return "messages" if isinstance(prompt, Chat) else "prompt"


def chat_text(tokenizer: Tokenizer, chat: Chat, defaults: Mapping[str, object] = {}) -> str:
    """The prompt of a chat, up to where the answer begins; `defaults` are variables that the request may change.

    Raises ApiError: the template refuses the chat, or does not use one of its fields.
    """
    if (fault := template_fault(tokenizer)) is not None:
        raise invalid(f"{fault}: use completions", "messages")
    variables = {**defaults, **_variables(tokenizer, chat)}
    try:
        messages = read_messages("messages", [message.model_dump(exclude_unset=True) for message in chat.messages])
        text = render_chat(tokenizer, messages, chat.tools, variables=variables)
        if roles := unused_roles(tokenizer, messages, chat.tools, variables):
            raise _unsupported(f"messages of the role {min(roles)}", "messages")
        # Templates leave out old reasoning by intent.
        if unused := unused_fields(tokenizer, messages, chat.tools, text, variables) - {*REASONING}:
            name = min(unused)
            raise _unsupported(name, name if name == "tools" else f"messages.{name}")
        return checked_text("the rendered prompt", text)
    except (DataError, ModelLoadError) as e:
        raise invalid(str(e), "messages") from None


def _variables(tokenizer: Tokenizer, chat: Chat) -> Mapping[str, object]:
    """The variables that a request gives to the template."""
    if (unread := unread_variable(tokenizer, chat.variables, chat.tools or None)) is not None:
        raise _unsupported(unread, f"chat_template_kwargs.{unread}"[:100])
    effort = chat.reasoning_effort
    if effort is None:
        return chat.variables
    wanted: dict[str, object] = {"reasoning_effort": effort}
    if effort == "none":
        wanted["enable_thinking"] = False
    read = {name: value for name, value in wanted.items() if unread_variable(tokenizer, [name]) is None}
    if not read:
        raise _unsupported("reasoning_effort", "reasoning_effort")
    return read | dict(chat.variables)


def _unsupported(name: str, param: str) -> ApiError:
    message = f"this model's chat template does not use {name[:100]}: leave it out"
    return ApiError(400, "unsupported_field", message, param)
