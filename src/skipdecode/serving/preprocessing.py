"""From a validated request to its state: token ids, limits, schedule, sampling. Knows nothing about HTTP."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skipdecode.common.options import kinds
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
from skipdecode.data.records import Record
from skipdecode.data.stopping import StopStrings
from skipdecode.data.template import PromptTemplate
from skipdecode.engine.requests import Request, Sampling
from skipdecode.errors import DataError, GrammarError, MissingExtraError, ModelLoadError, UsageError
from skipdecode.generation.calls import CallForm, parameters_of
from skipdecode.generation.detokenizer import Detokenizer, TokenTexts
from skipdecode.generation.grammar import GrammarKind, Grammars
from skipdecode.serving.errors import ApiError, invalid
from skipdecode.serving.limits import ServerLimits
from skipdecode.serving.protocol import Chat, ChatRequest, CompletionRequest, GenerationRequest, Prompt
from skipdecode.serving.request_state import Choice, RequestState

if TYPE_CHECKING:
    from skipdecode.serving.service import Catalog

_COMPLETION_TOKENS = 16  # OpenAI's default


class Preprocessor:
    """Turns requests into token ids and what else the engine needs.

    Its methods take time with long prompts: call them outside of the event loop, one at a time.

    `tokenizer` is copied: the worker's thread decodes with one copy, and prompts are encoded with another. `context`:
    tokens that the model can see at once. `end_tokens`: a choice ends after any of them. `template`: what completions'
    texts go into, and `use_template` whether they do where the request does not say. `variables`: those of
    the chat template, where the request gives no others.

    Attributes `sampling`, `stops`: of requests that do not say.

    Raises ModelLoadError: the tokenizer's chat template is no valid program; OptionError: it does not use a variable.
    """

    def __init__(
        self,
        tokenizer: Any,
        context: int | None,
        vocab_size: int,
        end_tokens: Iterable[int],
        catalog: Catalog,
        limits: ServerLimits,
        template: PromptTemplate | None = None,
        use_template: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        chat_fault(tokenizer)  # raises at start what every chat would meet
        self.context = context
        self._texts = TokenTexts(copy.deepcopy(tokenizer))
        # Without the context, which binds generation and not /tokenize: `_check_length` knows it.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._encoder = PromptEncoder(self._tokenizer, None)
        self._template = template or PromptTemplate()
        self._templated = PromptEncoder(self._tokenizer, None, self._template, variables=variables)
        self._variables = variables or {}
        self._use_template = use_template and template is not None
        self._end_tokens = frozenset(end_tokens)
        self._vocab_size = vocab_size
        self.sampling, self.stops = Sampling(), StopStrings()
        self._grammars = Grammars(self._tokenizer, vocab_size, self._end_tokens)
        self._catalog = catalog
        self._limits = limits

    def request_state(self, request: GenerationRequest, arrived: float, cache_salt: str = "") -> RequestState:
        """The state of a request that came at `arrived`, on `time.perf_counter`'s clock; `cache_salt` as in `Request`.

        Raises ApiError: it asks for what the server cannot give.
        """
        asked, copies = request.skipdecode, request.n
        sources = request.prompts()
        self._check_choices(len(sources), copies)
        template = self._use_template if asked.template is None else asked.template
        if template and self._template.text is None:
            raise invalid("this checkpoint names no template that it was tuned on: leave it out", "skipdecode.template")
        if asked.template and not all(isinstance(source, str) for source in sources):
            message = "only a text goes into the checkpoint's template, no chat and no token ids: leave template out"
            raise invalid(message, "skipdecode.template")
        prompts = []
        for index, source in enumerate(sources):
            try:
                prompts.append(self._checked(source, template))
            except ApiError as e:
                e.detail = (f"prompt[{index}]: " if len(sources) > 1 else "") + e.detail
                raise
        schedule = self._catalog.find(asked.schedule)
        state = RequestState(
            schedule=schedule,
            prompt_tokens=sum(map(len, prompts)),
            trace=asked.trace,
            arrived=arrived,
            deadline=arrived + self._limits.max_seconds,
            max_unread=self._limits.max_unread_tokens,
            calls=self._calls(request),
        )
        sampling = self._sampling(request, state.calls)  # once: its rows differ in their seeds
        stops = StopStrings(request.stops) if "stop" in request.model_fields_set else self.stops
        hidden = frozenset(request.stop_token_ids)
        self._check_ids(hidden, "stop_token_ids")
        ends = hidden if request.ignore_eos else self._end_tokens | hidden
        echo = isinstance(request, CompletionRequest) and request.echo
        scored = isinstance(request, CompletionRequest) and request.scores_prompt
        for index in range(len(prompts) * copies):
            prompt = prompts[index // copies]
            new_tokens = self._new_tokens(request, len(prompt))
            if request.min_tokens > new_tokens:
                message = f"min_tokens={request.min_tokens} is not accepted: at most {new_tokens} tokens are generated"
                raise invalid(message, "min_tokens")
            row = sampling.for_row(index)
            engine_request = Request(tuple(prompt), max(1, new_tokens), row, ends, cache_salt, asked.exact, scored)
            detokenizer = Detokenizer(self._texts, stops, hidden)
            state.choices.append(
                Choice(engine_request, detokenizer, state, index, index % copies, echo, not new_tokens)
            )
        return state

    def tokens(self, prompt: Prompt, special: bool | None = None, *, template: bool = False) -> list[int]:
        """Token ids of a prompt or a chat, of any length; with `template`, a text goes into the checkpoint's.

        `special` says whether the tokenizer adds its special tokens; by default it does, but for chats, whose template
        has them already.
        """
        if isinstance(prompt, tuple):
            return list(prompt)
        if isinstance(prompt, Chat):
            found = token_ids(
                self._tokenizer, [chat_text(self._tokenizer, prompt, self._variables)], special=bool(special)
            )[0]
            if not found:
                raise invalid("the chat has no token: give messages with text", "messages")
            return found
        if template:
            encoded = self._templated.encode([self._template.record(prompt)])[0]
        else:
            encoded = self._encoder.encode([Record(0, 0, 0, prompt)])[0]
        if encoded.error is not None:
            hint = " (in a request: skipdecode.template=false)" if template and prompt.strip() else ""
            raise invalid(encoded.error + hint, _field_of(prompt))
        if special is None:
            return encoded.token_ids
        return token_ids(self._tokenizer, [encoded.text], special=special)[0]

    def text(self, tokens: list[int]) -> str:
        """Decode token ids, special ones included; raises ApiError for ids that the model does not know."""
        self._check_ids(tokens, "tokens")
        return str(self._tokenizer.decode(tokens))

    # ------------------------------------------------------------------ parts

    def _check_choices(self, prompts: int, copies: int) -> None:
        most = self._limits.max_choices
        if prompts * copies > most:
            field = "n" if copies > most or prompts == 1 else "prompt"
            raise invalid(f"{prompts * copies} choices (prompts times n) are too many: at most {most} together", field)

    def _checked(self, prompt: Prompt, template: bool) -> list[int]:
        """Token ids of a prompt that leaves room for an answer."""
        tokens = self.tokens(prompt, template=template)
        self._check_ids(tokens, _field_of(prompt))
        given, most, context = len(tokens), self._limits.max_prompt_tokens, self.context
        limit = f"the model's context is {context}" if context is not None else ""
        if context is None or context > most:
            limit = "; ".join(filter(None, (f"this server's limit is {most}", limit)))
        if given > most or (context is not None and given >= context):
            # Words by which LiteLLM knows the error.
            message = f"the prompt has {given} tokens, which exceeds the maximum number of tokens allowed: {limit}"
            raise ApiError(400, "context_length_exceeded", message, _field_of(prompt))
        return tokens

    def _check_ids(self, tokens: Iterable[int], field: str) -> None:
        wrong = next((t for t in tokens if t >= self._vocab_size), None)
        if wrong is not None:
            raise invalid(f"token {wrong} is outside the model's vocabulary of {self._vocab_size}", field)

    def _new_tokens(self, request: GenerationRequest, prompt_tokens: int) -> int:
        most = self._limits.max_new_tokens
        room = most if self.context is None else min(most, self.context - prompt_tokens)
        asked = request.new_tokens
        if asked is None:
            return min(room, _COMPLETION_TOKENS) if isinstance(request, CompletionRequest) else room
        field = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
        if asked > most:
            raise invalid(f"{field}={asked} is not accepted: this server's limit is {most}", field)
        if asked > room:
            message = f"this model's maximum context length is {self.context} tokens: {prompt_tokens} of the prompt"
            message += f" and {field}={asked} are more"
            raise ApiError(400, "context_length_exceeded", message, field)
        return asked

    def _grammar(self, request: GenerationRequest, form: CallForm | None) -> Any:
        """Compile the grammar that the text has to fit, for `Sampling`; None without one."""
        asked: list[tuple[str, GrammarKind, Any]] = [] if request.grammar is None else [request.grammar]
        if form is not None and isinstance(request, ChatRequest) and (calling := request.calling).demanded:
            tools = [(i, tool) for i, tool in enumerate(calling.shown) if tool in calling.callable]
            asked = [(f"tools.{i}.function.parameters", "json", parameters_of(tool)) for i, tool in tools]
            asked += [("tools", "lark", form.grammar(calling, self._tokenizer.added_tokens_decoder))]
        found = None
        for each in asked:
            found = self._compiled(*each)
        return found

    def _calls(self, request: GenerationRequest) -> CallForm | None:
        """The form in which the model calls the tools of a request; None without tools."""
        if not isinstance(request, ChatRequest) or not request.calling.shown:
            return None
        form = CallForm.of(self._tokenizer, request.calling.shown)
        if form is None:
            message = "tools are for models that write calls as Hermes, Qwen or Llama 3: leave tools out"
            raise ApiError(400, "unsupported_field", message, "tools")
        return form

    def _compiled(self, field: str, kind: GrammarKind, source: Any) -> Any:
        try:
            return self._grammars.compile(kind, source)
        except GrammarError as e:
            where = (field + e.path.replace("/", "."))[:100]
            raise invalid(f"{field} is not accepted: {e}", where) from None
        except (MissingExtraError, UsageError) as e:
            raise ApiError(400, "unsupported_field", str(e), field) from None

    def _sampling(self, request: GenerationRequest, form: CallForm | None) -> Sampling:
        bias = {int(token): value for token, value in request.logit_bias.items()}
        self._check_ids(bias, "logit_bias")
        given = {name: getattr(request, name) for name in kinds(Sampling) if name in request.model_fields_set}
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            self._check_ids(given.get(name, ()), name)
        given |= {"temperature": request.temperature, "top_k": max(0, request.top_k), "logit_bias": bias}
        given |= {"grammar": self._grammar(request, form), "top_logprobs": request.top_logprobs_wanted}
        if "min_tokens" in request.model_fields_set:
            given |= {"min_new_tokens": request.min_tokens or None, "min_length": 0}
        return replace(self.sampling, **given)


def _field_of(prompt: Prompt) -> str:
    """The name under which it was sent."""
    return "messages" if isinstance(prompt, Chat) else "prompt"


# ---------------------------------------------------------------------- the text of a chat


def chat_text(tokenizer: Any, chat: Chat, defaults: Mapping[str, Any] = {}) -> str:
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


def _variables(tokenizer: Any, chat: Chat) -> Mapping[str, Any]:
    """The variables that a request gives to the template."""
    if (unread := unread_variable(tokenizer, chat.variables, chat.tools or None)) is not None:
        raise _unsupported(unread, f"chat_template_kwargs.{unread}"[:100])
    effort = chat.reasoning_effort
    if effort is None:
        return chat.variables
    made: dict[str, Any] = {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
    made = {name: value for name, value in made.items() if unread_variable(tokenizer, [name]) is None}
    if not made:
        raise _unsupported("reasoning_effort", "reasoning_effort")
    return made | dict(chat.variables)


def _unsupported(name: str, param: str) -> ApiError:
    message = f"this model's chat template does not use {name[:100]}: leave it out"
    return ApiError(400, "unsupported_field", message, param)
