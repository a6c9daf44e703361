"""Self-generated data: prompts from a file or drawn from the model, and its answers at full depth.

To draw a prompt, the model gets the beginning of its chat template up to the user's text, and writes the user's turn
(Magpie, arXiv 2406.08464). Every record is sampled with its own seed and kept when it is finished, so a run that was
killed continues, and gives the same files as an uninterrupted run.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipdecode.common.environment import COMMAND
from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import json_line, read_json
from skipdecode.common.options import Options, Reads, option
from skipdecode.common.progress import note, progress_bar
from skipdecode.common.resume import ANEW, ResumeLog, other_settings
from skipdecode.common.rows import check_streams
from skipdecode.data.chats import ToolChoice, render_chat, token_ids
from skipdecode.data.examples import RecordOptions, self_template
from skipdecode.data.prompts import PromptEncoder, check_end_token
from skipdecode.data.records import Record, Reject, refuse_rejects, reject_summary
from skipdecode.data.source import PromptSource
from skipdecode.data.stopping import StopStrings
from skipdecode.data.template import PromptTemplate
from skipdecode.engine.requests import Sampling, row_seed
from skipdecode.errors import DataError, UsageError
from skipdecode.generation.batch_lines import prompt_reader
from skipdecode.generation.decoding import Decoding, OutputRecord
from skipdecode.generation.output_files import WINDOW_BATCHES
from skipdecode.models.loading.identity import checkpoint_digest
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from skipdecode.generation.llm import LLM
    from skipdecode.models.loading.checkpoint import LoadedModel

TRAIN_FILE, DEV_FILE, TEST_FILE = "self.jsonl", "self-dev.jsonl", "self-test.jsonl"
ABOUT_FILE, LOG_FILE, _PROMPTS, _ANSWERS = "self.json", "self.sqlite", "prompts", "answers"
_DRAWN = 1000
_PROMPT_TOKENS = 128
_ROWS, _GPU_ROWS = 32, 128
_LEAST_TOKENS = 4
_ADMITS = 0.6  # of the time: rows that run then take about the rest, and those that take more are cut
_LEAST_STEPS = 8  # before sequences are cut: shorter texts are not kept
_GRAM, _LEAST_DISTINCT = 4, 0.7
_DEV_SHARE = 10
_SENTENCES = re.compile(r".*(?<!\d)[.!?](?=\s)", re.DOTALL)  # a full stop after a number may belong to a list
_USER = "@@what the user says@@"


@dataclass(frozen=True, kw_only=True)
class SelfGeneratedOptions(Options):
    self: bool = option("work on self-generated data: texts that the model gives at full depth", default=False)
    prompts: str | None = option(
        "with --self: file of prompts, read as generate reads its input (default: the model draws them, by its chat "
        "template)",
        default=None,
        path=Reads(),
    )
    self_records: int | None = option(
        f"with --self: prompts to draw, or to take from --prompts (default: {_DRAWN}, or all of the file)",
        default=None,
        least=1,
    )
    self_tokens: int = option("with --self: most tokens of an answer", default=256, least=1)
    self_temperature: float = option(
        "with --self: temperature of answers; 0 is greedy; prompts are drawn at 1", default=0.7, least=0
    )
    self_top_p: float = option(
        "with --self: top-p of prompts and answers: sample from the most likely tokens with this total probability",
        default=0.95,
        above=0,
        most=1,
    )

    def answers(self, seed: int, rules: Sampling) -> Sampling:
        """Return how answers are sampled, under the rules of the model."""
        top_p = self.self_top_p if self.self_temperature else 1.0
        return replace(rules, temperature=self.self_temperature, top_p=top_p, seed=seed)


def open_prompts(options: SelfGeneratedOptions) -> PromptSource | None:
    """Open the file of --prompts, if one is given.

    Refuses, before a model is loaded, options without --self, and a file without prompts.
    """
    names = [field.name for field in fields(SelfGeneratedOptions)]
    changed = [name for name in names if getattr(options, name) != getattr(type(options), name)]
    if not options.self and changed:
        raise UsageError(f"`{changed[0]}` goes with `self`: give both, or neither")
    if options.prompts is None:
        return None
    check_streams([options.prompts])
    return PromptSource.open(options.prompts).filled()


def forget_prompts(directory: Path) -> None:
    """Remove the log of drawn prompts from a directory whose run is finished."""
    (directory / LOG_FILE).unlink(missing_ok=True)


PROMPT_AND_RESPONSE = PromptTemplate("{prompt}", ("response",), chat=None)
"""Of prompts without a template of their own: chats if the model has a chat template."""


@dataclass(frozen=True, kw_only=True)
class SelfGeneratedData:
    """Prompts and answers of a model, kept in a directory."""

    llm: LLM
    template: PromptTemplate  # of the prompts
    options: SelfGeneratedOptions
    source: PromptSource | None  # the file of prompts that the options name; without one they are drawn
    directory: Path
    seed: int  # of all draws
    skip_bad: bool = False  # leave out, and name, records of the file without a prompt, instead of refusing the file
    overwrite: bool = False  # replace data that were made with other settings
    # Reading of `time.perf_counter()` at which drawing prompts (in a third of the time) and answering end.
    until: float = math.inf

    def prompts(self, without: Iterable[str] = ()) -> list[Record]:
        """Read or draw the prompts, without repetitions and those in `without`; case and white space are ignored.

        Raises DataError if none is left, or the file has records without a prompt that are not to be skipped.
        """
        seen = {_key(text) for text in without}
        if self.source is not None:
            return self._read(self.source, seen)
        (ids,) = token_ids(self.llm.tokenizer, [self._before_user()], special=False)  # it has its special tokens
        count = self.options.self_records or _DRAWN
        records = [Record(i, i + 1, i + 1, "", token_ids=tuple(ids)) for i in range(count)]
        sampling = Sampling(temperature=1.0, top_p=self.options.self_top_p, seed=row_seed(self.seed, 1))
        outputs = self._generated(_PROMPTS, records, sampling, _PROMPT_TOKENS, 1 / 3)
        values = [self.template.values_of_text(text) for _, text in self._usable(_PROMPTS, outputs, seen, 1)]
        return [Record(i, i + 1, i + 1, self.template.render(v), None, v) for i, v in enumerate(values)]

    def write_records(self, held_out: int, tested: int = 0) -> dict[str, Any]:
        """Write TRAIN_FILE and DEV_FILE, records of the template's fields and response, unless they exist.

        A tenth of the records, `held_out` at most and evenly distributed, goes to DEV_FILE. With `tested`, the prompts
        without a record in TRAIN_FILE go to TEST_FILE; up to half of the records are held out to make them so many.
        Returns the settings and the number of records, JSON-ready. Raises DataError if fewer than two are left.
        """
        path, settings = self.directory / ABOUT_FILE, self._settings()
        about: dict[str, Any] = read_json(path) if path.exists() else {}
        if "kept" in about:  # else of a run of version 0.1 that did not end
            changed = [name for name in settings if about["settings"].get(name) != settings[name]]
            if not changed:
                return about
            if not self.overwrite:
                raise UsageError(other_settings(path, changed[0], about.get("command", ""), ANEW))
            path.unlink()
        about = {"settings": settings, "before_user": "" if self.source else self._before_user()}
        check_end_token(self.llm.loaded.tokenizer)
        records = self.prompts()
        sampling = self.options.answers(row_seed(self.seed, 2), self.llm.backend.sampling)
        outputs = self._generated(_ANSWERS, records, sampling, self.options.self_tokens, 1.0)
        answers = self._usable(_ANSWERS, outputs, set(), 2)
        field = self.template.responses[0]
        lines = [json_line({"id": records[i].line, **records[i].values, field: text}) for i, text in answers]
        least = min(tested - (len(records) - len(answers)), len(lines) // 2)
        dev = max(1, least, min(held_out, len(lines) // _DEV_SHARE))
        dev_lines = {i * len(lines) // dev for i in range(dev)}
        for file, is_dev in ((DEV_FILE, True), (TRAIN_FILE, False)):
            part = [line for number, line in enumerate(lines) if (number in dev_lines) is is_dev]
            write_whole(self.directory / file, b"".join(part))
        if tested:
            learned = {i for number, (i, _) in enumerate(answers) if number not in dev_lines}
            others = (record for i, record in enumerate(records) if i not in learned)
            rows = ({"prompt": record.prompt, "id": record.line, **record.values} for record in others)
            write_whole(self.directory / TEST_FILE, b"".join(map(json_line, rows)))
        about |= {"command": COMMAND.get(), "prompts": len(outputs), "kept": len(answers)}
        write_whole(path, json.dumps(about) + "\n")
        forget_prompts(self.directory)
        return about

    def _settings(self) -> dict[str, Any]:
        """List all that the data depend on, JSON-ready."""
        settings = asdict(self.options) | {
            "prompts": self.source and self.source.fingerprint["sha256"],
            "model": self.llm.loaded.checkpoint.name,
            "checkpoint": checkpoint_digest(self.llm.loaded) | {"fit": None},  # full depth does not use it
            "dtype": str(self.llm.loaded.model.dtype).removeprefix("torch."),
            "template": self.template.to_dict(),
            "seed": self.seed,
            "rules": self.llm.backend.rules,
        }
        return dict(json.loads(json.dumps(settings)))

    def _before_user(self) -> str:
        """Render the beginning of the chat template, up to the user's text."""
        from skipdecode.engine.opening import end_tokens

        name, head, user = self.llm.loaded.checkpoint.name, "", ""
        if self.template.chat and self.template.text == "{prompt}":
            messages = [{"role": "user", "content": _USER}]
            head, user, _ = render_chat(self.llm.loaded.tokenizer, messages, answer=False).partition(_USER)
        if not (head and user):
            raise UsageError(
                f"{name} has no chat template, or was not tuned on chats, so it draws no "
                "prompts: give `prompts`, such as a text file with one a line"
            )
        if not end_tokens(self.llm.loaded.model, self.llm.loaded.tokenizer):
            raise UsageError(f"{name} has no end token, so no prompt that it draws ends: give `prompts`, a file")
        return head

    def _read(self, source: PromptSource, seen: set[str]) -> list[Record]:
        records, wrong, repeated = list[Record](), list[Reject](), list[Reject]()
        for row in source.records(prompt_reader(self.template)):
            record = self._question(row)
            key = _key(str(record.prompt))
            if record.error is not None:
                wrong.append(Reject(record.line, record.error))
            elif key in seen:
                repeated.append(Reject(record.line, "repeated: the prompt of an earlier line"))
            elif len(records) < (self.options.self_records or math.inf):
                seen.add(key)
                records.append(_alone(record, len(records)))
        refuse_rejects("`prompts`", wrong, skip_bad=self.skip_bad)
        rejects = sorted(wrong + repeated)
        if not records:
            raise DataError(f"`prompts` {self.options.prompts}: no prompt is left: {reject_summary(rejects)}")
        if rejects:
            note(f"prompts: {reject_summary(rejects)}")
        return records

    def _question(self, record: Record) -> Record:
        """Reduce a chat to its first question, which is answered."""
        if record.error or isinstance(record.prompt, str):
            return record
        text = next((turn["content"] for turn in record.prompt if turn["role"] == "user"), None)
        if not isinstance(text, str) or len(self.template.fields) > 1:
            return replace(record, error="a chat: give its text")
        values, left_out = self.template.values_of_text(text), record.left_out
        if len(record.prompt) > 1:
            left_out = (*left_out, "all of a chat but its first question")
        return replace(record, prompt=self.template.render(values), values=values, left_out=left_out)

    def _generated(
        self, stage: str, records: Sequence[Record], sampling: Sampling, max_new_tokens: int, share: float
    ) -> dict[int, OutputRecord]:
        """Return outputs by index, from the log of an earlier run or generated now in a share of the time left."""
        stop = StopStrings(self.llm.backend.stop)
        decoding = Decoding(sampling=sampling, max_new_tokens=max_new_tokens, stop=stop)
        log = ResumeLog(self.directory / LOG_FILE, self._settings(), what="rows", remedy=ANEW, restart=self.overwrite)
        with closing(log):
            if log.get(stage) is None:  # else finished, maybe by the clock
                self._generate(stage, records, decoding, share, log)
                log.put(stage, True)
            return {int(key.split()[1]): output for key, output in log.items() if key.startswith(f"{stage} ")}

    def _generate(
        self, stage: str, records: Sequence[Record], decoding: Decoding, share: float, log: ResumeLog
    ) -> None:
        """Put the outputs that a log does not have into it."""
        llm = self.llm
        size = _GPU_ROWS if llm.loaded.model.device.type == "cuda" else _ROWS
        remaining = [record for record in records if log.get(f"{stage} {record.index:08}") is None]
        window, last_begin, until, limit = WINDOW_BATCHES * size, math.inf, math.inf, ""
        total: int | None = len(records)
        if self.until < math.inf:  # the clock ends it, most likely before the last record
            start = time.perf_counter()
            seconds = share * max(0.0, self.until - start)
            window, last_begin, until, total = size, start + _ADMITS * seconds, start + seconds, None
            limit = f"of {len(records)}; ends after {seconds / 60:.1f} min at most"
        least = _LEAST_STEPS * min(size, len(remaining))
        in_time = takewhile(lambda record: time.perf_counter() < last_begin, remaining[size:])
        begun = chain(remaining[:size], in_time)
        outputs = llm.iterate(
            PromptEncoder(llm.tokenizer, llm.context, self.template).stream(begun, window),
            decoding,
            Schedule.full(llm.num_layers),
            rows=size,
            window=window,
            cut=lambda: time.perf_counter() > until and llm.stats.new_tokens >= least,
        )
        with progress_bar(total, "row", name=f"self-{stage}", done=len(records) - len(remaining)) as bar:
            bar.set_postfix_str(limit, refresh=False)
            for output in outputs:
                log.put(f"{stage} {output.index:08}", output.to_record())
                bar.update()

    def _usable(
        self, stage: str, outputs: Mapping[int, OutputRecord], seen: set[str], least: int
    ) -> list[tuple[int, str]]:
        """Select numbers and texts of outputs, none of `seen` and none twice; notes why others are left out."""
        usable, reasons = list[tuple[int, str]](), Counter[str]()
        for index, output in outputs.items():
            output = _cut(output)
            text = output.get("text", "").strip()
            if fault := self._fault(output, text) or ("repeated" if _key(text) in seen else ""):
                reasons[fault] += 1
            else:
                seen.add(_key(text))
                usable.append((index, text))
        why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        message = f"{stage}: {len(usable)} of {len(outputs)} kept" + (f" ({why})" if why else "")
        if len(usable) < least:
            raise DataError(
                f"{message}, {least} are needed: give more `self_records`, more `self_tokens`, or `prompts`"
            )
        note(message)
        return usable

    def _fault(self, output: OutputRecord, text: str) -> str:
        """Say why a text is left out; empty if it is not."""
        if "error" in output:
            return "too long for the context"
        ids = self.llm.tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) < _LEAST_TOKENS:
            return "too short" if output["finish_reason"] == "eos" else "not ended"
        return "repetitive" if is_repetitive(ids) else ""


def _alone(record: Record, index: int) -> Record:
    """Number a record, without its system message and tools: its answer is learned without them."""
    left_out = (*record.left_out, *map(repr, record.for_chat))
    settings = record.settings and replace(record.settings, calling=ToolChoice(), json_schema=None)
    return replace(record, index=index, for_chat={}, left_out=left_out, settings=settings)


def _cut(output: OutputRecord) -> OutputRecord:
    """Cut a text that reached a limit after its last complete sentence, if it has one."""
    if output.get("finish_reason") != "length":
        return output
    complete = without_broken_end(output["text"])
    return output if complete == output["text"] else {**output, "text": complete, "finish_reason": "eos"}


def is_repetitive(tokens: Sequence[int]) -> bool:
    """Whether a text repeats itself so much that it teaches loops: too few of its runs of four tokens are different."""
    grams = [tuple(tokens[i : i + _GRAM]) for i in range(len(tokens) - _GRAM + 1)]
    return len(set(grams)) < _LEAST_DISTINCT * len(grams)


def without_broken_end(text: str) -> str:
    """Return the complete sentences of a text, or all of it if it has none."""
    complete = _SENTENCES.match(text)
    return text if complete is None else complete[0]


def _key(text: str) -> str:
    return " ".join(text.lower().split())


def own_answers(
    loaded: LoadedModel,
    options: SelfGeneratedOptions,
    records: RecordOptions,
    source: PromptSource | None,
    out: Path,
    *,
    seed: int,
    held_out: int,
    tested: int = 0,
    until: float = math.inf,
    overwrite: bool = False,
) -> tuple[PromptTemplate, dict[str, Any]]:
    """Write the model's answers at full depth to `out`, unless they exist; returns their template, and the settings.

    See `SelfGeneratedData.write_records`, which names the files. `until`: the reading of `time.perf_counter()` at which
    drawing and answering end; default: all prompts are answered. `overwrite`: replace answers that were made with other
    settings.
    """
    from skipdecode.generation.llm import LLM

    template = self_template(records) or loaded.checkpoint.recipe.template or PROMPT_AND_RESPONSE
    template = template.for_tokenizer(loaded.tokenizer)
    data = SelfGeneratedData(
        llm=LLM(loaded),
        template=template,
        options=options.part(SelfGeneratedOptions),
        source=source,
        directory=out,
        seed=seed,
        skip_bad=records.skips_bad,
        overwrite=overwrite,
        until=until,
    )
    return template, data.write_records(held_out, tested)
