"""Chat with a model in the terminal; answers stream, and the schedule can be changed between turns.

/2x, /3x, …      use this nominal speed-up from the next turn on; smollm2-135m has a fit for 1.2x and 1.4x
/full            use full depth from the next turn on
/schedule NAME   use a schedule by name or file; without NAME: list the schedules
/system TEXT     set the system message; without TEXT: none
/reset           forget all turns
/help, /quit     show these commands; end (also Ctrl-D). Ctrl-C stops an answer and keeps its text so far

On a terminal, a line after each answer shows its speed, the mean layers of a token, and the time to the first token.
If standard input is no terminal, each line is a turn or a command, and answers are printed as plain text.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from threading import Event
from typing import TYPE_CHECKING

from skipdecode.cli.options import MODEL, ChatOptions, DecodingOptions, EngineOptions, ScheduleOptions, choose_schedule
from skipdecode.common.jsonl import Json, decoded, line_parts, read_lines
from skipdecode.common.options import Reads, option
from skipdecode.common.progress import note
from skipdecode.data.chats import chat_fault
from skipdecode.data.messages import Message
from skipdecode.errors import DataError, SkipDecodeError, UsageError
from skipdecode.models.checkpoint_schedule import bundled_schedules, schedule_file
from skipdecode.models.loading.checkpoint import Checkpoint, model_files, open_checkpoint
from skipdecode.schedule import Schedule
from skipdecode.schedule.grammar import is_speedup

if TYPE_CHECKING:
    from skipdecode.generation.llm import LLM


@dataclass(frozen=True, kw_only=True)
class Config(EngineOptions, DecodingOptions, ScheduleOptions, ChatOptions):
    model: str = option(
        f"{MODEL}; needs a chat template", default="smollm2-135m", positional=True, path=Reads(model_files)
    )
    system: str | None = option("system message", default=None)
    max_new_tokens: int = option("most tokens of an answer", default=512, least=1)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The model's files, with the schedule file that is named, else the schedules that the package has for it."""
        schedules = bundled_schedules(self.model) if self.schedule is None else [self.schedule]
        return open_checkpoint(self.model, self.adapter_base, schedules, self.dtype)


def run(config: Config) -> int:
    """Chat until the input ends; returns 0, or 1 if a turn or a command of a pipe was refused."""
    from skipdecode.generation.stats import schedule_line

    schedule, origin = choose_schedule(config, config.schedule, config.max_new_tokens)
    loaded = config.load()
    if (fault := chat_fault(loaded.tokenizer)) is not None:
        raise UsageError(
            f"{config.model}: {fault}: use skipdecode generate, or give an instruction-tuned model such as smollm2-135m"
        )
    note(schedule_line(schedule, origin))
    template = loaded.checkpoint.recipe.template
    if template is not None and not template.chat:
        note(f"{config.model} was tuned on prompts {template.text!r}, not on chats: use skipdecode generate")
    llm = config.llm(
        loaded,
        schedule,
        max_rows=1,
        chat_template_kwargs=config.chat_template_kwargs,
        generation_config=config.generation_config,
    )
    session, refused = _Session(config, llm), False
    for text in map(str.strip, _lines()):
        if text == "/quit":
            break
        try:
            if text.startswith("/"):
                session.command(*(text[1:].split(maxsplit=1) or [""]))
            elif text:
                session.answer(text)
        except SkipDecodeError as e:
            note(" ".join(str(e).split()))
            refused = not sys.stdin.isatty()
    return int(refused)


def _lines() -> Iterator[str]:
    """The lines that the user types, or the lines of standard input."""
    if not sys.stdin.isatty():
        for number, raw in read_lines(line_parts(sys.stdin.buffer)):
            try:
                yield decoded(raw)
            except DataError as e:
                note(f"line {number} is skipped: {e}")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # editing and history of `input`
    note("/help lists the commands; Ctrl-D ends")
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except UnicodeDecodeError as e:
            note(f"the line is skipped: not {e.encoding}")
        except KeyboardInterrupt:
            print("\nskipdecode: Ctrl-D or /quit ends the chat", file=sys.stderr)


class _Session:
    """The turns so far, and the schedule of the next one."""

    def __init__(self, config: Config, llm: LLM) -> None:
        self._config, self._llm = config, llm
        self._system = config.system
        self._turns: list[Message] = []
        self._schedule: Schedule = llm.schedule_of(None)

    def command(self, name: str, value: str = "") -> None:
        """Run a command; raises UsageError if it is unknown."""
        if name == "help":
            print((__doc__ or "").split("\n\n")[1])
        elif name == "reset":
            self._turns.clear()
        elif name == "system":
            self._system = value or None
        elif name == "schedule" and not value:
            note(f"{self._schedule.name}; others: {', '.join(self._llm.schedules)}, a speed-up such as /2x, or a file")
        elif name == "schedule" or name == "full" or is_speedup(name) or re.fullmatch(r"[\d.]+x-p\d+", name):
            self._switch(value if name == "schedule" else name)
        else:
            raise UsageError(f"unknown command /{name}: /help lists the commands")

    def _switch(self, requested: str) -> None:
        from skipdecode.generation.stats import schedule_line

        file = schedule_file(f"{self._config.model}-{requested}")
        named = file if file in self._config.checkpoint.schedule_files else requested
        self._schedule = self._llm.schedule_of(named, self._config.max_new_tokens)
        note(schedule_line(self._schedule, "from the next turn on"))

    def answer(self, text: str) -> None:
        """Print the model's answer to a turn of the user; raises DataError if the turn does not fit the context."""
        start, first = time.perf_counter(), None
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        history = [*system, *self._turns, {"role": "user", "content": text}]
        messages = self._llm.fit_chat(history, self._config.max_new_tokens)
        if dropped := (len(history) - len(messages)) // 2:
            forgotten = "turn is" if dropped == 1 else f"{dropped} turns are"
            note(f"the context of {self._llm.context} tokens is full: the oldest {forgotten} dropped")
        options: Json = self._config.sampling_fields() | {"exact": self._config.exact}
        stream = self._llm.chat(messages, self._config.max_new_tokens, stream=True, schedule=self._schedule, **options)
        with _interruptible() as stopped:
            for piece in stream:
                first = first or time.perf_counter() - start
                print(piece, end="", flush=True)
                if stopped.is_set():
                    stream.close()
        print()
        self._turns = [*messages[len(system) :], {"role": "assistant", "content": stream.text}]
        if sys.stdout.isatty() and (stats := stream.stats) is not None:
            layers = stats.mean_layers or len(self._schedule.prompt_layers())
            line = f"{stats.decode_tokens_per_s or 0:.1f} tokens/s, {layers:.1f} of {stats.num_layers} layers"
            line += f", first token after {first:.2f} s" if first else ""
            print(line if os.environ.get("NO_COLOR") else f"\x1b[2m{line}\x1b[0m", flush=True)


@contextlib.contextmanager
def _interruptible() -> Iterator[Event]:
    """Set the event at the first Ctrl-C on a terminal; the answer then ends at the next piece of text."""
    stopped, before = Event(), signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, before)

    if sys.stdin.isatty():
        signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
