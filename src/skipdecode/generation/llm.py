"""Text generation in Python: a model on its fastest engine, with a schedule for each call.

`skipdecode.data` encodes prompts and ends texts, as for the command line and the server.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, overload

from skipdecode.common.environment import isolated_torch
from skipdecode.common.jsonl import prepared_use
from skipdecode.common.plain import listed, unwrapped
from skipdecode.common.progress import note
from skipdecode.common.types import PreTrainedModel
from skipdecode.data.chats import checked_variables
from skipdecode.data.messages import Message, is_message
from skipdecode.data.prompts import EncodedPrompt, PromptEncoder, context_length, vocabulary_size
from skipdecode.data.records import read_records
from skipdecode.data.stopping import StopStrings
from skipdecode.data.template import Prompt, PromptTemplate, are_token_ids
from skipdecode.engine.opening import end_tokens, load, open_engines
from skipdecode.engine.requests import BATCH, Request, Sampling
from skipdecode.errors import DataError, ModelLoadError, OptionError, UntunedScheduleWarning, UsageError
from skipdecode.generation.batch_lines import prompt_reader
from skipdecode.generation.decoding import Decoding, Output, check_options, positive
from skipdecode.generation.detokenizer import Detokenizer, TokenTexts
from skipdecode.generation.grammar import Grammars, JsonSchema
from skipdecode.generation.loop import Generated, TextLoop
from skipdecode.generation.shared_engine import SharedEngine
from skipdecode.generation.stats import RunStats
from skipdecode.generation.stream import TextStream
from skipdecode.models.families import unwrap
from skipdecode.models.loading.checkpoint import LoadedModel, open_checkpoint
from skipdecode.schedule import Schedule

# One for each model: its weights, buffers and layers serve one forward at a time.
_LOCKS: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class RunningPrompt(Generated):
    """A prompt in an engine, with its request and the text so far."""

    prompt: EncodedPrompt


class Outputs(list[Output]):
    """The outputs of a call, in the order of its prompts, and the statistics of the call as `stats`."""

    stats: RunStats


class LLM:
    """A model that is ready to generate text.

    Calls can have different schedules and share the weights. Calls of several threads, also of another LLM of the same
    loaded model, wait for each other; a stream takes its turn at each piece.

    Attributes `loaded`: model, tokenizer and checkpoint. `context`: tokens of the model's context; None: no limit.
    `variables`: those of the chat template. `backend`: opens engines of the model. `stats`: of the last call.

    Raises SkipDecodeError: the model cannot be loaded, the engine does not support it, or the schedule does not fit it.

    Parameters
    ----------
    model : str, Path or LoadedModel
        A name as for `skipdecode.load`, or its result, or a directory that `prepare` wrote, which also gives the
        schedule, base and quantization that are not given here.
    schedule : Schedule or str, optional
        The schedule of calls without one: see `schedule_of`. Default: the schedule of the checkpoint, else full depth.
        For a model that is loaded by name, a fit beside a schedule file is used.
    engine : {"auto", "fast", "transformers"}
        The engine; auto: the fast engine if it supports the model.
    quantization : {"none", "int8", "w8a8"}, optional
        Quantization of the weights after loading (fast engine, CPUs). Default: none.
    dtype, device, base
        For a model that is loaded by name: see `skipdecode.load`.
    max_rows : int
        Most prompts that are decoded together.
    chat_template_kwargs : mapping, optional
        Variables of the chat template, such as ``{"enable_thinking": False}``.
    generation_config : bool
        Whether calls follow the rules and stop strings of the checkpoint's generation config; see `generate`.
    """

    @isolated_torch()
    def __init__(
        self,
        model: str | Path | LoadedModel,
        schedule: Schedule | str | Path | None = None,
        *,
        engine: str = "auto",
        quantization: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        base: str | Path | None = None,
        max_rows: int = BATCH,
        chat_template_kwargs: Mapping[str, object] | None = None,
        generation_config: bool = True,
    ) -> None:
        if not isinstance(model, LoadedModel):
            use = prepared_use(model) if isinstance(model, str | Path) else {}
            schedule = use.get("schedule") if schedule is None else schedule
            base = use.get("base") if base is None else base
            quantization = use.get("quantization") if quantization is None else quantization
            model = use.get("model", model)
            model = load(open_checkpoint(model, base, [schedule], dtype), dtype=dtype, device=device, engine=engine)
        elif base is not None:
            raise UsageError("base is for an adapter that is loaded by name: give it to skipdecode.load")
        quantization, loaded = "none" if quantization is None else quantization, model
        if loaded.tokenizer is None:
            raise ModelLoadError(f"{loaded.checkpoint.name} has no tokenizer: text needs one")
        self.loaded, self.tokenizer = loaded, loaded.tokenizer
        self.texts = TokenTexts(self.tokenizer)
        self.num_layers = loaded.checkpoint.num_layers
        self.context = context_length(loaded.model.config)
        self.stats = RunStats(num_layers=self.num_layers)
        self.variables = checked_variables(self.tokenizer, chat_template_kwargs)
        self._schedule, max_rows = schedule, positive("max_rows", max_rows)
        self.schedule_of(schedule)
        self._lock = _LOCKS.setdefault(unwrap(loaded.model), threading.RLock())
        with self._lock:  # the projection weights may be fused
            self.backend = open_engines(loaded.model, engine, note, quantization, generation_config=generation_config)
        self._ends = end_tokens(loaded.model, self.tokenizer)
        self.grammars = Grammars(self.tokenizer, vocabulary_size(loaded.model), self._ends)
        self._engine = SharedEngine(self.backend, max_rows, self._lock)
        self._noted: set[str] = set()  # fields that are not in the prompts, and other notes, each once
        self._warned: set[Schedule] = set()

    def __reduce_ex__(self, protocol: object) -> str:
        message = "an LLM is not copied or pickled: LLM(llm.loaded) shares its weights, and a process loads it by name"
        raise UsageError(message)

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The schedules by name: full depth, and those that the weights were tuned under."""
        return self.loaded.checkpoint.schedules

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 128,
        *,
        schedule: Schedule | str | Path | None = None,
        stop: str | Sequence[str] | None = None,
        template: bool | str = True,
        exact: bool = True,
        json_schema: JsonSchema | None = None,
        **sampling: Any,
    ) -> Outputs:
        """Generate a text for each prompt, in batches of `max_rows`; greedy unless a temperature is given.

        Raises DataError: a prompt cannot be used (`index` is its position; nothing is generated); UsageError,
        ScheduleError: a value is not accepted; GrammarError: a schema cannot be enforced.

        Parameters
        ----------
        prompts : a prompt, or a list of prompts
            See `Prompt`. A table, such as a DataFrame or a dataset, is a list of records.
        max_new_tokens : int
            Most new tokens of an output; fewer at the end of the context.
        schedule : Schedule or str, optional
            The schedule of this call: see `schedule_of`.
        stop : str or sequence of str, optional
            Stop strings: they end an output and are cut off. Default: those of the generation config, if it has some.
        template : bool or str
            False: texts stay as they are; or a template in place of the checkpoint's or the model's (see `Prompt`).
        exact : bool
            Let the fast engine draft tokens from the text and from earlier outputs of this object, where that is
            faster; each draft is checked, so the tokens are the same, sampled ones too. False: one token a forward.
        json_schema : dict or str, optional
            Every text that ends by itself (`finish_reason` "eos") is JSON that this schema accepts; needs the extra
            `structured`.
        **sampling
            Fields of `skipdecode.engine.Sampling`: temperature, top_k, top_p, seed, repetition_penalty, … Rules that
            are not given are those of the generation config. The random numbers of a prompt depend on the seed and its
            index in the list, not on its batch.

        Warns
        -----
        UntunedScheduleWarning
            Once for each schedule that the weights were not tuned under.
        """
        start = time.perf_counter()
        with self._lock, isolated_torch():
            encoded, decoding, schedule = self._prepared(
                _listed(prompts),
                max_new_tokens,
                schedule=schedule,
                stop=stop,
                template=template,
                exact=exact,
                json_schema=json_schema,
                **sampling,
            )
            outputs = Outputs()
            for output in self.iterate(encoded, decoding, schedule):
                if output.error is not None:  # the first outputs, before anything is generated
                    raise DataError(output.error, index=output.index)
                outputs.append(output)
        outputs.sort(key=lambda output: output.index)
        outputs.stats = self.stats
        outputs.stats.seconds = time.perf_counter() - start
        return outputs

    @overload
    def chat(
        self, messages: list[Message], max_new_tokens: int = ..., *, stream: Literal[False] = ..., **options: Any
    ) -> Output: ...

    @overload
    def chat(
        self, messages: list[Message], max_new_tokens: int = ..., *, stream: Literal[True], **options: Any
    ) -> TextStream: ...

    def chat(
        self, messages: list[Message], max_new_tokens: int = 128, *, stream: bool = False, **options: Any
    ) -> Output | TextStream:
        """Generate the next message of a chat, as an output or, with `stream`, in pieces.

        Other options and errors are those of `generate`.
        """
        if not isinstance(messages, list | tuple):
            raise OptionError("messages", messages, 'a list of messages, such as {"role": "user", "content": "Hello"}')
        if stream:
            return self.stream(messages, max_new_tokens, **options)
        (output,) = self.generate([messages], max_new_tokens, **options)
        return output

    def fit_chat(self, messages: list[Message], max_new_tokens: int = 128) -> list[Message]:
        """Drop the oldest turns of a chat, so that the context has room for it and the next message.

        The room is `max_new_tokens`, or half of the context if that is less. A system message at the start stays.

        Raises DataError: the last turn alone leaves no room, or cannot be used.
        """
        system = [message for message in messages[:1] if message.get("role") in ("system", "developer")]
        turns, needed = messages[len(system) :], min(max_new_tokens, (self.context or 2) // 2)
        while True:
            (prompt,) = self.encode([[*system, *turns]])
            if prompt.error is None and (prompt.room is None or prompt.room >= needed or len(turns) == 1):
                return [*system, *turns]
            if len(turns) <= 1:
                raise DataError(prompt.error or "")
            turns = turns[2:]

    def stream(self, prompt: Prompt, max_new_tokens: int = 128, **options: Any) -> TextStream:
        """Generate the text of one prompt as a stream of pieces; `stats` are available at its end.

        Options and errors are those of `generate`.
        """
        start = time.perf_counter()
        with self._lock, isolated_torch():
            (encoded,), decoding, schedule = self._prepared([prompt], max_new_tokens, **options)
            try:
                row = self.make_request(encoded, decoding)
            except DataError as e:
                raise DataError(str(e), index=0) from None
            engine, stats = self._engine.take()

            def finished() -> RunStats:
                self._engine.give_back(engine)
                self.stats = stats
                stats.seconds = time.perf_counter() - start
                stats.add(row.tokens, row.finish_reason)
                return stats

            loop = TextLoop[Generated](engine)
            loop.submit([row], schedule)
            return TextStream(loop, row, finished, self._lock)

    def encode(self, prompts: Sequence[Prompt], *, template: bool | str = True) -> list[EncodedPrompt]:
        """Encode prompts, with their `room` in the context; a prompt that cannot be used has an `error`."""
        if isinstance(prompts, str | Mapping):
            raise OptionError("prompts", prompts, "a list of prompts")
        text = template if isinstance(template, str) else None
        chosen = PromptTemplate(text)
        with self._lock, isolated_torch():
            if template and text is None:
                tuned = self.loaded.checkpoint.recipe.template
                chosen = self.resolve_template(tuned or PromptTemplate(chat=None))
            rows = ((1, chosen.row(prompt)) for prompt in listed(prompts, "prompts"))
            return self.encoder(chosen).encode(list(read_records(rows, prompt_reader(chosen))))

    @isolated_torch()
    def schedule_of(self, requested: Schedule | str | Path | None, max_new_tokens: int = 128) -> Schedule:
        """Return the schedule of a call with this argument: a schedule, or its text (`schedule.grammar`), as "2x:p15".

        A speed-up without a schedule of the checkpoint falls over `max_new_tokens` positions. None: the schedule of the
        LLM, by default the checkpoint's, else full depth.

        Raises ScheduleError: the schedule is unknown, or is for another number of layers.
        """
        return self.loaded.checkpoint.parse(self._schedule if requested is None else requested, max_new_tokens)

    def resolve_template(self, template: PromptTemplate) -> PromptTemplate:
        """Return the template for the model's tokenizer; a broken default chat template is noted, and left out."""
        try:
            return template.for_tokenizer(self.tokenizer)
        except ModelLoadError as e:
            line = f"{e}; prompts are left as they are"
            if line not in self._noted:
                self._noted.add(line)
                note(line)
            return replace(template, chat=False)

    def encoder(self, template: PromptTemplate) -> PromptEncoder:
        """Make the encoder of prompts of a template; see `PromptEncoder`."""
        size = vocabulary_size(self.loaded.model)
        return PromptEncoder(
            self.tokenizer, self.context, template, vocabulary=size, noted=self._noted, variables=self.variables
        )

    def constrained(self, sampling: Sampling, json_schema: JsonSchema | None) -> Sampling:
        """Return settings under which texts fit a JSON schema, if there is one; raises `GrammarError`."""
        if json_schema is None:
            return sampling
        return replace(sampling, grammar=self.grammars.compile("json", json_schema))

    def make_request(self, prompt: EncodedPrompt, decoding: Decoding) -> RunningPrompt:
        """Make the request of a prompt and the reader of its text.

        Raises DataError: the prompt cannot be used, or its record asks for what the model cannot do.
        """
        if prompt.error is not None:
            raise DataError(prompt.error)
        try:
            settings = decoding.for_record(prompt.record, self.grammars)
            most = settings.max_new_tokens if prompt.room is None else min(settings.max_new_tokens, prompt.room)
            request = Request(tuple(prompt.token_ids), most, settings.sampling, self._ends, exact=settings.exact)
            if prompt.record.settings is not None:
                request.check_vocabulary(self.grammars.vocab_size)
        except UsageError as e:
            raise DataError(f"body: {e}") from None
        return RunningPrompt(request, Detokenizer(self.texts, settings.stop), prompt)

    def iterate(
        self,
        prompts: Iterable[EncodedPrompt],
        decoding: Decoding,
        schedule: Schedule | None = None,
        *,
        rows: int | None = None,
        window: int | None = None,
        cut: Callable[[], bool] = lambda: False,
    ) -> Iterator[Output]:
        """Yield an output for each prompt of `encode` when it is finished; one that cannot be used comes at once.

        The model is locked in a step, not between two outputs. `stats` are those of this call from its begin on.
        An iterator that is left early ends the texts that run.

        `prompts` are read as they are needed; each has its index in its record. `schedule`: by default that of the LLM.
        `rows`: most prompts that are decoded together; default: `max_rows`. `window`: prompts that are taken at once,
        and sorted by length, when none waits; default: all. `cut` is called after each step; once it is true, the texts
        that run end as at their most tokens, and no further prompt is taken.

        Raises WorkError: the accelerator is out of memory.
        """
        schedule = self.schedule_of(None) if schedule is None else schedule
        with self._engine.lend(rows, decoding.max_new_tokens) as (engine, stats):
            self.stats = stats
            loop, remaining, has_more = TextLoop[RunningPrompt](engine), iter(prompts), True
            while has_more or loop.running:
                if has_more and not engine.waiting:
                    taken, new = list(islice(remaining, window)), list[RunningPrompt]()
                    has_more = bool(taken)
                    for prompt in taken:
                        try:
                            new.append(self.make_request(prompt, decoding))
                        except DataError as e:
                            stats.rows, stats.bad_rows = stats.rows + 1, stats.bad_rows + 1
                            yield Output(replace(prompt, error=str(e)))
                    with self._lock:
                        loop.submit(new, schedule)
                with self._lock:
                    ended = loop.advance()
                    if cut():
                        ended, has_more = ended + loop.cut(), False
                for running in ended:
                    stats.add(running.tokens, running.finish_reason)
                    yield Output(running.prompt, running.text, running.tokens, running.finish_reason)

    def _prepared(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        *,
        schedule: Schedule | str | Path | None = None,
        stop: str | Sequence[str] | None = None,
        template: bool | str = True,
        exact: bool = True,
        json_schema: JsonSchema | None = None,
        **sampling: Any,
    ) -> tuple[list[EncodedPrompt], Decoding, Schedule]:
        """Check a call; returns its encoded prompts, decoding settings and schedule."""
        check_options(sampling)
        stop, template, exact = map(unwrapped, (stop, template, exact))
        if not isinstance(template, bool | str):
            raise OptionError("template", template, "True, False, or a template such as '{text}'")
        if not isinstance(exact, bool):
            raise OptionError("exact", exact, "True or False")
        rules = replace(self.backend.sampling, **sampling)
        rules.check_effect()
        stop = self.backend.stop if stop is None else stop
        decoding = Decoding(
            sampling=self.constrained(rules, json_schema),
            max_new_tokens=positive("max_new_tokens", max_new_tokens),
            stop=StopStrings((stop,) if isinstance(stop, str) else stop),
            exact=exact,
        )
        schedule = self.schedule_of(schedule, max_new_tokens)
        line = self.loaded.untuned_line([schedule])
        if line is not None and schedule not in self._warned:
            self._warned.add(schedule)
            warnings.warn(line, UntunedScheduleWarning, stacklevel=3)
        return self.encode(prompts, template=template), decoding, schedule


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """List one or several prompts; a list of messages is one chat, and one of whole numbers its token ids."""
    items = listed(prompts, "prompts")
    is_chat = bool(items) and all(map(is_message, items))
    return [items] if is_chat or are_token_ids(items) else items


def generate(name: str, prompts: Prompt | Sequence[Prompt], **options: Any) -> Outputs:
    """Load a model and generate: `LLM(name).generate(prompts, **options)`. For several calls, use an `LLM`."""
    return LLM(name).generate(prompts, **options)
