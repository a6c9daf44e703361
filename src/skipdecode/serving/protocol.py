"""What clients may send, as pydantic models: OpenAI's fields and one extension. Anything else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler as Handler

from skipdecode.common.jsonl import Json, is_text
from skipdecode.data.chats import ToolChoice
from skipdecode.data.messages import chat_fields
from skipdecode.engine.requests import Sampling
from skipdecode.errors import OptionError
from skipdecode.generation.batch_lines import schema_of
from skipdecode.generation.grammar import GrammarKind, GrammarSource
from skipdecode.serving.errors import ApiError, invalid

_MOST_STOPS = 16
_MOST_STOP_TOKENS = 64
_MOST_STOP_CHARACTERS = 1000
_MOST_SUPPRESSED = 1000
_INT64 = 2**63
_UNUSED = "accepted; not used, not kept"


def _utf8_text(text: str) -> str:
    if not is_text(text):
        raise ValueError("half of a surrogate pair is no text")
    return text


Text = Annotated[str, AfterValidator(_utf8_text)]
Neutral = Mapping[str, tuple[object, ...]]


class Strict(BaseModel):
    """Fields that are known, of the right type. What is null, or changes nothing, is as good as left out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_implemented(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        fields = {}
        for name, value in data.items():
            if value is None:
                continue
            if name in cls.model_fields or name not in cls.neutral:
                fields[name] = value
            elif not any(_same(value, neutral) for neutral in cls.neutral[name]):
                accepted = "".join(f", or give {neutral!r}" for neutral in cls.neutral[name])
                message = f"{name} is not implemented: leave it out{accepted}"
                raise ApiError(400, "unsupported_field", message, name)
        return fields


def _same(value: object, neutral: object) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


TokenId = Annotated[int, Field(ge=0)]
Stop = Annotated[Text, Field(min_length=1, max_length=_MOST_STOP_CHARACTERS)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]

# Fields of OpenAI's and of vLLM's that are not implemented, with the values that change nothing.
_NEUTRAL: Neutral = {
    "audio": (), "bad_words": ([],), "best_of": (1,), "early_stopping": (False,), "echo": (False,),
    "function_call": ("none",), "functions": ([],), "guided_decoding_backend": ("auto", "guidance"),
    "include_reasoning": (False, True), "include_stop_str_in_output": (False,), "length_penalty": (1,),
    "modalities": (["text"],), "parallel_tool_calls": (False, True), "prediction": (), "priority": (0,),
    "prompt_logprobs": (), "reasoning_effort": (), "service_tier": ("auto", "default"), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "store": (False,), "suffix": ("",), "tool_choice": ("none", "auto"),
    "tools": ([],), "use_beam_search": (False,), "verbosity": ("medium",), "web_search_options": (),
}  # fmt: skip
_NEUTRAL_IN_CHATS: Neutral = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
}


_BOUNDS = {"least": "ge", "most": "le", "above": "gt", "below": "lt"}


def _sampling(name: str, description: str | None = None, *, default: Any = None, **bounds: float | None) -> Any:
    """A field for an option of `Sampling`, with its help text, bounds and default or with others."""
    option = Sampling.__dataclass_fields__[name]
    within = {_BOUNDS[of]: value for of, value in (option.metadata["bounds"] | bounds).items() if value is not None}
    default = option.default if default is None else default
    return Field(default, description=description or option.metadata["help"], **within)


class Extension(Strict):
    """Which layers run, and whether the client wants to know."""

    schedule: str | None = Field(default=None, description="one of the names of /v1/models")
    trace: bool = Field(default=False, description="report the number of layers of each token")
    exact: bool = Field(
        default=True, description="draft tokens where that is faster; each is checked, so the text is the same"
    )
    template: bool | None = Field(
        default=None,
        description="put a completion's text into the template that the checkpoint was tuned on, or leave it as it is "
        "(default: the server's, see /v1/models)",
    )


class StreamOptions(Strict):
    """Options of a streamed response."""

    neutral: ClassVar[Neutral] = {"include_obfuscation": (False,)}
    include_usage: bool = False
    continuous_usage_stats: Annotated[bool, Field(description="with include_usage: the usage in every chunk")] = False


Schema = Json | Text
Choices = Annotated[list[Text], Field(min_length=1)]


class StructuredOutputs(Strict):
    """vLLM's: one of these."""

    neutral: ClassVar[Neutral] = {"disable_fallback": (False, True), "disable_any_whitespace": (False,)}
    json_schema: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool = False
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None


class Message(Strict):
    """One message of a chat; an answer of this server, or of OpenAI's, may be sent back as it came.

    `skipdecode.data.messages` reads it, as it reads those of files.
    """

    neutral = {"annotations": ([],), "audio": ()}
    type: Literal["text", "message"] | None = Field(None, description="accepted; says nothing more than the role")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[Json | Text], Field(min_length=1)] | None = None
    refusal: Text | None = Field(None, description="the content of an answer without another")
    name: Text | None = Field(None, description="refused if the chat template does not use it")
    tool_calls: list[Json] = []
    function_call: Json | None = Field(None, description="OpenAI's older form of one call")
    tool_call_id: Text | None = None
    reasoning_content: Text | None = Field(None, description="of an earlier answer, for chat templates that use it")
    reasoning: Text | None = Field(None, description="as reasoning_content")
    thinking: Text | None = Field(None, description="as reasoning_content")


_VARIABLES = "variables of the chat template, such as enable_thinking"


@dataclass(frozen=True)
class Chat:
    """Messages, and what else their chat template is given."""

    messages: list[Message]
    variables: Mapping[str, object] = field(default_factory=dict)
    reasoning_effort: str | None = None
    tools: Sequence[Mapping[str, object]] = ()


class _Declared(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: Json = Field({})
    strict: bool = Field(False, description="accepted; a schema holds where tool_choice demands a call")


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: _Declared
    _sent: Json  # its entries in the client's order, which the prompt keeps

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: Json, handler: Handler[Tool]) -> Tool:
        tool = handler(data)
        tool._sent = data
        return tool


class _GenerationFields(Strict):
    """Fields that completions and chats have in common."""

    neutral = _NEUTRAL
    model: str | None = Field(None, description="the served name, or left out")
    n: int = Field(1, ge=1, description="choices for each prompt; default 1")
    temperature: float = _sampling("temperature", "default 1; 0 is greedy", default=1.0, most=2)
    top_p: float = _sampling("top_p")
    top_k: int = _sampling("top_k", "only the k most likely tokens; 0 and -1 are all", least=-1)
    min_p: float = _sampling("min_p")
    # Far beyond what is of use, and so that no logit overflows.
    repetition_penalty: float = _sampling("repetition_penalty", above=None, least=0.1, most=10)
    no_repeat_ngram_size: int = _sampling("no_repeat_ngram_size")
    suppress_tokens: list[TokenId] = Field([], max_length=_MOST_SUPPRESSED, description="token ids that do not come")
    begin_suppress_tokens: list[TokenId] = Field([], max_length=_MOST_SUPPRESSED, description="not as first token")
    frequency_penalty: float = _sampling("frequency_penalty")
    presence_penalty: float = _sampling("presence_penalty")
    seed: int | None = _sampling("seed", least=-_INT64, below=_INT64)
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="new tokens of a choice at most")
    min_tokens: int = _sampling("min_new_tokens", default=0)
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS)] = Field([])
    stop_token_ids: list[TokenId] = Field([], max_length=_MOST_STOP_TOKENS)
    ignore_eos: bool = False
    logit_bias: dict[BiasKey, Bias] = Field({}, max_length=1000)
    response_format: Json | None = Field(None, description="OpenAI's; `strict` or not, its schema holds")
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = Field(None, description=_UNUSED)
    safety_identifier: str | None = Field(None, description=_UNUSED)
    prompt_cache_key: str | None = Field(None, description=_UNUSED)
    metadata: Json | None = Field(None, description=_UNUSED)
    skipdecode: Extension = Extension()

    @field_validator("logit_bias")
    @classmethod
    def _one_value_a_token(cls, bias: dict[str, float]) -> dict[str, float]:
        if len({int(token) for token in bias}) < len(bias):
            raise invalid("logit_bias names a token twice: give each id once", "logit_bias")
        return bias

    @model_validator(mode="after")
    def _options_of_streams(self) -> _GenerationFields:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise invalid("stream_options belongs to a stream: give stream=true, or leave it out", "stream_options")
        if self.stream_options.continuous_usage_stats and not self.stream_options.include_usage:
            raise invalid("continuous_usage_stats needs include_usage=true", "stream_options.continuous_usage_stats")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def grammar(self) -> tuple[str, GrammarKind, GrammarSource] | None:
        """The field that says which grammar the text has to fit, the kind of grammar, and the grammar."""
        structured = self.structured_outputs or StructuredOutputs()
        try:
            form = schema_of(self.response_format or {"type": "text"})
        except OptionError as e:
            raise invalid(str(e), "response_format") from None
        named: dict[str, tuple[GrammarKind, GrammarSource | None]] = {
            "response_format.json_schema.schema": ("json", form),
            "structured_outputs.json": ("json", structured.json_schema),
            "structured_outputs.json_object": ("json", {"type": "object"} if structured.json_object else None),
            "structured_outputs.regex": ("regex", structured.regex),
            "structured_outputs.choice": ("choice", structured.choice),
            "structured_outputs.grammar": ("grammar", structured.grammar),
            "guided_json": ("json", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choice", self.guided_choice),
            "guided_grammar": ("grammar", self.guided_grammar),
        }
        grammars = [(name, kind, source) for name, (kind, source) in named.items() if source is not None]
        if len(grammars) > 1:
            message = f"{grammars[0][0]} and {grammars[1][0]} both say what the text has to fit: give one of them"
            raise invalid(message, grammars[1][0])
        if grammars and self.ignore_eos:
            raise invalid("a text that has to fit a grammar ends with it: leave ignore_eos out", "ignore_eos")
        return grammars[0] if grammars else None


class CompletionRequest(_GenerationFields):
    """Body of /v1/completions."""

    neutral: ClassVar[Neutral] = {**_NEUTRAL, "add_special_tokens": (True,)}
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(None, description="new tokens of a choice at most")
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="log-probabilities of the prompt's tokens and of so many top tokens, as in vLLM"
    )
    echo: bool = Field(False, description="the prompt before the new text, with its log-probabilities if asked for")

    @model_validator(mode="after")
    def _fits(self) -> CompletionRequest:
        if self.prompt_logprobs is not None and (self.stream or self.logprobs not in (None, self.prompt_logprobs)):
            message = "prompt_logprobs needs an answer without stream, and is not another number than logprobs"
            raise invalid(message, "prompt_logprobs")
        return self

    @property
    def new_tokens(self) -> int | None:
        """Most new tokens, if the client says so."""
        return self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        """Number of top tokens that are reported; None if no log-probabilities are."""
        return self.prompt_logprobs if self.logprobs is None else self.logprobs

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are wanted."""
        return self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)

    def prompts(self) -> Sequence[Prompt]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: Any = self.prompt
        if isinstance(prompts[0], int):
            return [tuple(prompts)]
        return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]


class ChatRequest(_GenerationFields):
    """Body of /v1/chat/completions."""

    neutral: ClassVar[Neutral] = {**_NEUTRAL, **_NEUTRAL_IN_CHATS}
    messages: Annotated[list[Message], Field(min_length=1)]
    chat_template_kwargs: Json = Field({}, description=_VARIABLES)
    reasoning_effort: Text | None = Field(None, description="for the chat template; none: enable_thinking=false too")
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[Tool] = Field([], max_length=128, description="for chat templates that render them")
    tool_choice: Literal["none", "auto", "required"] | Json = "auto"
    parallel_tool_calls: bool = Field(True, description="false: one call at most")

    @model_validator(mode="after")
    def _fits(self) -> ChatRequest:
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise invalid("max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
        if self.calling.shown and self.grammar is not None:
            message = f"a text that fits {self.grammar[0]} calls no tool: leave tools out, or give tool_choice none"
            raise invalid(message, "tools")
        return self

    @cached_property
    def calling(self) -> ToolChoice:
        """The tools that the model sees, and those that it may or has to call."""
        tools = chat_fields({"tools": [tool._sent for tool in self.tools]}, chat=True).get("tools", [])
        try:
            return ToolChoice.of(tools, self.tool_choice, several=self.parallel_tool_calls)
        except OptionError as e:
            raise invalid(str(e), "tool_choice") from None

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def prompts(self) -> Sequence[Prompt]:
        """The chat, as the one prompt of the request."""
        return [Chat(self.messages, self.chat_template_kwargs, self.reasoning_effort, self.calling.shown)]


GenerationRequest = CompletionRequest | ChatRequest
#: Text, token ids, or a chat.
Prompt = str | tuple[int, ...] | Chat


class TokenizeRequest(Strict):
    """Body of /tokenize: prompt or messages."""

    neutral: ClassVar[Neutral] = {**_NEUTRAL_IN_CHATS, "add_special_tokens": (), "return_token_strs": (False,)}
    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    chat_template_kwargs: Json = Field({}, description=_VARIABLES)
    add_special_tokens: bool | None = Field(
        None, description="the start token and the like; default: true, but for a chat, whose template has them"
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("give prompt or messages, one of the two", "prompt")
        return self

    @property
    def source(self) -> Prompt:
        return self.prompt if self.prompt is not None else Chat(self.messages or [], self.chat_template_kwargs)


class DetokenizeRequest(Strict):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
