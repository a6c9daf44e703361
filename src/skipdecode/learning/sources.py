"""The records and prompts of `skipdecode.prepare`, checked before any work, and their form for the stages."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from skipdecode.common.files import is_stream, write_whole
from skipdecode.common.jsonl import json_line
from skipdecode.common.progress import note
from skipdecode.common.rows import Input, dataset_id, read_rows
from skipdecode.data.examples import RecordOptions, encode_source, make_template, written_turns
from skipdecode.data.records import refuse_rejects, reject_summary
from skipdecode.data.source import Records, Source, held_out, load_records, read_file
from skipdecode.data.tasks import Task, load_task
from skipdecode.data.template import PromptTemplate
from skipdecode.errors import UsageError
from skipdecode.evaluation.metrics import EncoderOptions, check_metric, check_metrics
from skipdecode.generation.self_generated import DEV_FILE, TEST_FILE, TRAIN_FILE, open_prompts, own_answers
from skipdecode.learning.answers import answer_examples
from skipdecode.learning.distributions import save_distributions, text_key
from skipdecode.learning.invented_names import Renaming
from skipdecode.learning.settings import PrepareOptions
from skipdecode.learning.stages import LearningRecords
from skipdecode.models.loading.checkpoint import LoadedModel

_ANSWERS_LOG, DISTRIBUTIONS_FILE = "answers.sqlite", "distributions.safetensors"
_MOST_DEV_RECORDS = 256  # of the model's own answers, at most
_LEAST_ANSWERED = 20  # records: answers to fewer are not learned
_MOST_ANSWERS = 4096
_TESTED = 48  # prompts that are not learned from, at least, if there are twice as many


class Sources:
    """The sources by name: train, dev, test, and the directory of the run, where records are written.

    Raises UsageError, DataError: records are missing or cannot be used, as the stages would after minutes of work.
    """

    def __init__(self, settings: PrepareOptions, sources: Mapping[str, Source], out: Path) -> None:
        self._settings, self._sources, self._out = settings, dict(sources), out
        self._rewritten: dict[str, Records] = {}
        self._prompts = open_prompts(settings)
        if not settings.self:
            if "train" not in sources:
                raise UsageError("`train` is missing: give records with responses, or `self`")
            self._template = make_template(settings, sources["train"])
        elif settings.task and self._prompts is None and "test" not in sources:
            raise UsageError(
                "`test` is missing: with `task`, give records to evaluate on, or `prompts` with references"
            )
        self.datasets = [dataset for source in sources.values() if (dataset := dataset_id(source))]
        self.digests = {name: _digest(name, source) for name, source in sources.items()}
        if self._prompts is not None:
            self.digests["prompts"] = self._prompts.fingerprint["sha256"]
        self._check()

    def _check(self) -> None:
        settings, whole = self._settings, False
        test = self._sources.get("test") or self._sources.get("dev") or settings.prompts
        if settings.self and not settings.task:
            if isinstance(test, str | Path):
                open_prompts(replace(settings, prompts=str(test)))
            return
        check_metrics(self.task(1).metrics, settings.part(EncoderOptions), note)
        if not settings.self:
            whole = self._template.shape is not None
            learned = {name: source for name, source in self._sources.items() if whole or name != "test"}
            files = {n: read_file(source, self._template, skip_bad=settings.skips_bad) for n, source in learned.items()}
            if whole or "dev" not in files:
                self._rewritten = files
            if "dev" not in files:
                files["train"], files["dev"] = held_out(files["train"])
        if test is not None and not whole:
            load_records(self.task(1), test, skip_bad=settings.skips_bad)

    @property
    def test(self) -> Any:
        """The records or prompts to evaluate on."""
        return self._sources.get("test") or self._sources.get("dev") or self._out / "answers" / TEST_FILE

    @property
    def known(self) -> Source:
        """The records whose names tuning may learn by heart."""
        return self._sources.get("train") or self.test

    def task(self, most: int) -> Task:
        """The task, or the records' prompt and response; `most` is the maximum number of new tokens."""
        if self._settings.task:
            return load_task(self._settings.task, check_metric)
        template = make_template(self._settings) if self._settings.self else self._template
        how = ("bleu", "rougeL", "chrf"), most
        return Task("records", str(template.text), template.responses, *how, chat=bool(template.chat))

    def written_records(self, loaded: LoadedModel) -> LearningRecords:
        """The records and their options: as they are, or, of a known shape or with a part held out, as files."""
        self._template = template = self._template.for_tokenizer(loaded.tokenizer)
        settings = self._settings
        options = settings.part(RecordOptions) if settings.task else self._options(template)
        for name, file in self._rewritten.items():
            written = written_turns(replace(file, name=name), template, loaded.tokenizer)
            refuse_rejects(name, written.skipped, skip_bad=settings.skips_bad)
            self._sources[name] = path = str(self._out / "records" / f"{name}.jsonl")
            _write(Path(path), written, template.responses[0])
        return LearningRecords(self._sources["train"], self._sources["dev"], options)

    def _options(self, template: PromptTemplate) -> RecordOptions:
        """The options of records without a task, for this template."""
        options = replace(self._settings.part(RecordOptions), prompt_template=template.text, prompt_field=None)
        return replace(options, response_field=template.responses[0], chat=bool(template.chat))

    def with_invented_names(self, responses: LearningRecords) -> LearningRecords:
        """The records, and again those whose responses repeat names or numbers of the prompt, under invented ones."""
        template, paths = make_template(responses.options), list[str]()
        for name, source in (("train", responses.train), ("dev", responses.dev)):
            file = read_file(source, template, skip_bad=True)
            renaming = Renaming.of(file.items, template, self._settings.seed)
            more = [replace(other, id=f"{other.id}, other names") for other in renaming.others(file.items)]
            if file.skipped:
                note(f"{name}: {reject_summary(file.skipped)}")
            if more:
                note(f"{name}: {len(more)} of {len(file.items)} records are learned under invented names too")
            paths.append(str(self._out / "records" / f"named-{name}.jsonl"))
            _write(Path(paths[-1]), replace(file, items=(*file.items, *more)), template.responses[0])
        return replace(responses, train=paths[0], dev=paths[1])

    def answer_records(self, responses: LearningRecords, loaded: LoadedModel, until: float) -> LearningRecords:
        """The prompts of given records with the model's greedy answers, as many as the time allows."""
        options = replace(responses.options, bad_records="skip")
        template, directory = make_template(options), self._out / "answers"
        file = self._drawn(read_file(responses.train, template, skip_bad=True), template)
        examples, _ = encode_source(file, "train", template, loaded, options)
        examples = list({example.prompt: example for example in examples}.values())  # records may share a prompt
        answers = answer_examples(loaded, examples, directory / _ANSWERS_LOG, until)
        if len(answers) < _LEAST_ANSWERED:
            note(f"{len(answers)} prompts are answered in time, which are too few to learn: the responses are learned")
            return responses
        note(f"{len(answers)} of {len(examples)} prompts answered at full depth, in place of their responses")
        records = {str(record.id): record for record in file.items}
        answered = tuple(replace(records[answer.example.id], references=(answer.text,)) for answer in answers)
        for name, part in zip((TRAIN_FILE, DEV_FILE), held_out(replace(file, items=answered)), strict=True):
            _write(directory / name, part, template.responses[0])
        distributions = {text_key(answer.example.prompt, answer.tokens): answer.taught for answer in answers}
        save_distributions(directory / DISTRIBUTIONS_FILE, distributions)
        train, dev, top = (str(directory / name) for name in (TRAIN_FILE, DEV_FILE, DISTRIBUTIONS_FILE))
        return LearningRecords(train, dev, responses.options, own=True, distributions=top)

    def _drawn(self, file: Records, template: PromptTemplate) -> Records:
        """Records of a file to answer, in another order: every second under invented names, each with an id."""
        drawn = random.Random(self._settings.seed).sample(file.items, min(_MOST_ANSWERS, len(file.items)))
        renaming = Renaming.of(drawn, template, self._settings.seed)
        drawn[::2] = map(renaming.renamed, drawn[::2])
        records = [replace(record, id=number) for number, record in enumerate(drawn)]  # ids may repeat
        return replace(file, name="answers", items=tuple(records), skipped=())

    def self_generate(self, loaded: LoadedModel, until: float) -> LearningRecords:
        """The files of the model's own answers at full depth, and the options for their prompt and response."""
        settings, directory, held_out = self._settings, self._out / "answers", "test" not in self._sources
        count = held_out * min(_TESTED, settings.test_records)
        answer = partial(own_answers, loaded, settings, settings, self._prompts, directory)
        template, _ = answer(seed=settings.seed, held_out=_MOST_DEV_RECORDS, tested=count, until=until)
        if held_out:
            rows = [row for _, row in read_rows(directory / TEST_FILE) if isinstance(row, dict)]
            if settings.task:  # the same prompts, with their references
                task = self.task(1)
                questions, field = set(map(task.template.render, rows)), task.references[0]
                records = load_records(task, settings.prompts, skip_bad=settings.skips_bad).items
                answered = (record for record in records if record.prompt in questions)
                rows = [{**record.values, field: list(record.references)} for record in answered]
                write_whole(directory / TEST_FILE, b"".join(map(json_line, rows)))
            note(f"no `test`: {len(rows)} prompts that are not learned from are held out for the evaluation")
        options = settings.part(RecordOptions) if settings.task else self._options(template)
        # An answer may be a token longer when it is read again, and then exceed the context.
        options = replace(options, bad_records="skip")
        return LearningRecords(str(directory / TRAIN_FILE), str(directory / DEV_FILE), options, own=True)


def _write(path: Path, file: Records, field: str) -> None:
    """Write records, each with its response in this field."""
    lines = []
    for record in file.items:
        values: dict[str, Any] = {**(record.values or {"prompt": record.prompt})}
        lines.append(json_line({**record.for_chat, **values, "id": record.id, field: record.references[0]}))
    write_whole(path, b"".join(lines))


def _digest(name: str, source: Source) -> str:
    """The digest of records."""
    if not isinstance(source, str | Path):
        return hashlib.sha256(b"".join(map(json_line, source))).hexdigest()
    if is_stream(str(source)):
        raise UsageError(f"`{name}` is read several times, so it cannot be a pipe: give a file")
    with closing(Input.open(str(source))) as file:
        return str(file.sha256)
