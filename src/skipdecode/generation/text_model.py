"""A loaded model with its engines, prompts and grammars: the part of `skipdecode.LLM` that verbs use too."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from skipdecode.common.environment import isolated_torch
from skipdecode.common.progress import note
from skipdecode.common.types import PreTrainedModel
from skipdecode.data.chats import checked_variables
from skipdecode.data.prompts import EncodedPrompt, PromptEncoder, context_length, vocabulary_size
from skipdecode.data.template import PromptTemplate
from skipdecode.engine.base import Engine
from skipdecode.engine.opening import end_tokens, open_engines
from skipdecode.engine.requests import Request, Sampling
from skipdecode.errors import DataError, ModelLoadError, UsageError, WorkError
from skipdecode.generation.decoding import Decoding, Output, positive
from skipdecode.generation.detokenizer import Detokenizer, TokenTexts
from skipdecode.generation.grammar import Grammars, JsonSchema
from skipdecode.generation.loop import Generated, TextLoop
from skipdecode.generation.stats import RunStats
from skipdecode.models.families import unwrap
from skipdecode.models.loading.checkpoint import LoadedModel
from skipdecode.schedule import Schedule

# One for each model: its weights, buffers and layers serve one forward at a time.
_LOCKS: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class RunningPrompt(Generated):
    """A prompt in an engine, with its request and the text so far."""

    prompt: EncodedPrompt


class TextModel:
    """A loaded model that turns encoded prompts into outputs; parameters and attributes are those of `LLM`."""

    def __init__(
        self,
        loaded: LoadedModel,
        schedule: Schedule | str | Path | None,
        max_rows: int,
        chat_template_kwargs: Mapping[str, object] | None,
        engine: str,
        quantization: str,
        generation_config: bool,
    ) -> None:
        if loaded.tokenizer is None:
            raise ModelLoadError(f"{loaded.checkpoint.name} has no tokenizer: text needs one")
        self.loaded, self.tokenizer = loaded, loaded.tokenizer
        self.texts = TokenTexts(self.tokenizer)
        self.num_layers = loaded.checkpoint.num_layers
        self.context = context_length(loaded.model.config)
        self.stats = RunStats(num_layers=self.num_layers)
        self.variables = checked_variables(self.tokenizer, chat_template_kwargs)
        self._schedule, self._max_rows = schedule, positive("max_rows", max_rows)
        self.schedule_of(schedule)
        self._lock = _LOCKS.setdefault(unwrap(loaded.model), threading.RLock())
        with self._lock:  # the projection weights may be fused
            self.backend = open_engines(loaded.model, engine, note, quantization, generation_config=generation_config)
        self._ends = end_tokens(loaded.model, self.tokenizer)
        self.grammars = Grammars(self.tokenizer, vocabulary_size(loaded.model), self._ends)
        self._engine: Engine | None = None  # of earlier calls
        self._noted: set[str] = set()  # fields that are not in the prompts, and other notes, each once

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
        of_model, size = (self.tokenizer, self.context), vocabulary_size(self.loaded.model)
        return PromptEncoder(*of_model, template, vocabulary=size, noted=self._noted, variables=self.variables)

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
            own = decoding.for_record(prompt.record, self.grammars)
            most = own.max_new_tokens if prompt.room is None else min(own.max_new_tokens, prompt.room)
            request = Request(tuple(prompt.token_ids), most, own.sampling, self._ends, exact=own.exact)
            if prompt.record.settings is not None:
                request.check_vocabulary(self.grammars.vocab_size)
        except UsageError as e:
            raise DataError(f"body: {e}") from None
        return RunningPrompt(request, Detokenizer(self.texts, own.stop), prompt)

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
        with self._running_engine(rows, decoding.max_new_tokens) as (engine, stats):
            loop, left, more = TextLoop[RunningPrompt](engine), iter(prompts), True
            while more or loop.running:
                if more and not engine.waiting:
                    taken, new = list(islice(left, window)), list[RunningPrompt]()
                    more = bool(taken)
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
                        ended, more = ended + loop.cut(), False
                for running in ended:
                    stats.add(running.tokens, running.finish_reason)
                    yield Output(running.prompt, running.text, running.tokens, running.finish_reason)

    @contextmanager
    def _running_engine(self, rows: int | None, max_new_tokens: int) -> Iterator[tuple[Engine, RunStats]]:
        """Take an engine for a call, whose statistics become `stats`; it is closed if the call fails or is left."""
        engine, stats = self._take_engine(rows)
        self.stats, start = stats, time.perf_counter()
        try:
            yield engine, stats
        except torch.OutOfMemoryError:
            engine.close()
            batch = f"{rows or self._max_rows} rows of up to {max_new_tokens} new tokens"
            raise WorkError(
                f"out of memory with {batch}: give a smaller batch size (finished rows of a file output are kept)"
            ) from None
        except BaseException:
            engine.close()  # its prefix cache may be incomplete
            raise
        stats.seconds = time.perf_counter() - start
        if rows is None:
            self._engine = engine

    def _take_engine(self, rows: int | None = None) -> tuple[Engine, RunStats]:
        """Take the engine of earlier calls, with their prompts in its prefix cache; a new one if another call has it.

        A call that ends without an error gives it back. One for other `rows` is always new.
        """
        with self._lock:
            engine = self._engine if rows is None else None
            if engine is None:
                engine = self.backend.engine(max_rows=rows or self._max_rows, prefix_cache=True)
            else:
                self._engine = None
            engine.stats = stats = RunStats(num_layers=self.num_layers)
            return engine, stats
