"""The statistics of a run, and their text for users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skipdecode.common.progress import note
from skipdecode.common.tables import byte_size
from skipdecode.engine.base import EngineStats
from skipdecode.engine.requests import FinishReason
from skipdecode.generation.decoding import Output
from skipdecode.generation.speed import SpeedComparison
from skipdecode.schedule import Schedule

_BAD_ROWS_SHOWN = 20
_FIELDS = (
    *("num_layers", "rows", "bad_rows", "rows_resumed", "steps", "prompt_tokens", "new_tokens", "seconds"),
    *("short_heads", "head_fallbacks", "kv_bytes_peak", "kv_bytes_full_peak", "tokens_per_s", "decode_tokens_per_s"),
)


@dataclass
class RunStats(EngineStats):
    """The statistics of a run, or of a call of `skipdecode.LLM`; as text, a line or two.

    An engine counts in it while the run goes on. Records of an earlier run are only counted.
    """

    num_layers: int = 0  # decoder layers of the model
    rows: int = 0  # records in the output
    bad_rows: int = 0  # those that are errors
    rows_resumed: int = 0  # those that an earlier run finished
    ended_at_once: int = 0  # sequences that ended with their first token: they have no text
    seconds: float = 0.0  # from reading the first record to the end of the last sequence
    comparison: SpeedComparison | None = None

    def __str__(self) -> str:
        resumed = f", {self.rows_resumed} of them by an earlier run" if self.rows_resumed else ""
        layers, total = self.mean_layers, _counted(self.rows, "record")
        lines = [
            f"{total}{resumed}; {_counted(self.new_tokens, 'new token')} in "
            f"{self.seconds:.1f} s, {self.tokens_per_s:.1f} tokens/s, prompts included"
        ]
        if layers is not None:
            saved = f", {self.kv_saved:.0%} saved" if self.kv_saved else ""
            lines.append(f"{_depths(self, layers)}; keys and values: at most {byte_size(self.kv_bytes_peak)}{saved}")
        if self.drafted_tokens:
            lines.append(
                f"{_counted(self.drafted_tokens, 'draft')}, of which {self.accepted_tokens} were accepted: "
                f"{self.fed_tokens / max(1, self.fed_tokens - self.accepted_tokens):.2f} tokens a step of a sequence"
            )
        if self.ended_at_once:
            good = _counted(self.rows - self.bad_rows, "record")
            lines.append(
                f"{self.ended_at_once}{' new' if resumed else ''} of {good} ended at the first token, without text: is "
                "the prompt of the form that the model was tuned on? Its own template, another template or a task "
                "gives it"
            )
        if self.bad_rows:
            lines.append(f"{self.bad_rows} of {total} could not be used; the output holds the error of each")
        return "\n".join(lines)

    def add(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> None:
        """Count a sequence that has ended."""
        self.rows += 1
        self.ended_at_once += finish_reason == "eos" and len(tokens) == 1

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens fed back per second of decoding; None if none was."""
        return self.fed_tokens / self.decode_seconds if self.decode_seconds else None

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second in the engine, prompts included."""
        return self.new_tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def kv_saved(self) -> float | None:
        """Share of the keys and values that full depth would have held; None if nothing was held."""
        return 1 - self.kv_bytes_peak / self.kv_bytes_full_peak if self.kv_bytes_full_peak else None

    def to_dict(self) -> dict[str, object]:
        """Return the statistics, JSON-ready."""
        return {name: getattr(self, name) for name in _FIELDS} | {
            "rows_ended_at_once": self.ended_at_once,
            "prefill_s": self.prompt_seconds,
            "decode_s": self.decode_seconds,
            "decode_tokens": self.fed_tokens,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "mean_layers_per_token": self.mean_layers,
            "kv_saved_share": self.kv_saved,
            "comparison": None if self.comparison is None else self.comparison.to_dict(),
        }


def note_bad(output: Output, number: int) -> None:
    """Note a record that cannot be used, the `number`th of a run; all are in the output file."""
    if number <= _BAD_ROWS_SHOWN:
        note(f"line {output.source.record.line}: {output.error}; the record is skipped")
    elif number == _BAD_ROWS_SHOWN + 1:
        note("more records are skipped; the output holds the error of each")


def schedule_line(schedule: Schedule, origin: str) -> str:
    """Describe a schedule, and where it is from."""
    if schedule.is_full:
        return f"full depth, {schedule.num_layers} layers ({origin})"
    return f"schedule {depth_words(schedule)} ({origin})"


def depth_words(schedule: Schedule) -> str:
    """Describe a schedule: its name, and how many layers prompts and new tokens run."""
    first, last, layers = schedule.budgets[0], schedule.budgets[-1], schedule.num_layers
    prompt, depth = len(schedule.prompt_layers()), f"{first}" if first == last else f"{first} to {last}"
    if last == layers:
        return f"{schedule.name}: prompts alone skip layers and run {prompt} of {layers}; new tokens run all"
    return f"{schedule.name}: {f'prompts {prompt}, new tokens ' if prompt < layers else ''}{depth} of {layers} layers"


def _depths(stats: RunStats, layers: float) -> str:
    """Write the mean layers of prompts and new tokens; `layers` are those of a new token."""
    nominal = f"{stats.num_layers / layers:.2f}x nominal"
    if stats.prompt_layers == stats.prompt_tokens * stats.num_layers:
        return f"{layers:.1f} of {stats.num_layers} layers for a token on average ({nominal})"
    prompts = f"prompts ran {stats.prompt_layers / stats.prompt_tokens:.1f} of {stats.num_layers} layers"
    new_tokens = "all" if layers == stats.num_layers else f"{layers:.1f} on average ({nominal}, without prompts)"
    return f"{prompts}, new tokens {new_tokens}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
