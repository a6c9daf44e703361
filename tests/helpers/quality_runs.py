"""Runs of `skipdecode eval` on a tiny model whose outputs are known: the first words of each record's reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints import byte_tokenizer, save_tiny_encoder
from skipdecode import Schedule
from skipdecode.data.records import Record
from skipdecode.data.source import Records
from skipdecode.data.tasks import Task
from skipdecode.engine.opening import Backend
from skipdecode.evaluation.metrics import EncoderOptions, make_metrics
from skipdecode.evaluation.results import EvaluationSettings, Run
from skipdecode.evaluation.run import TaskEvaluation, encode_prompts
from skipdecode.generation.speed import Generation, Method
from tiny import LAYERS, tiny_model

TEXT = "the quick brown fox jumps over a lazy dog near old quiet river banks today"
REFERENCES = [" ".join(TEXT.split()[i : i + 8]) for i in range(8)]
TASK = Task("mine", "{text}:", ("answer",), ("bleu", "rougeL", "bertscore_f1"), 60)
SECONDS_A_LAYER = 0.01
RECIPE = {
    "schedule": "full",
    "options": {"steps": 300, "learning_rate": 1e-3, "nominal_speedup": 1.0, "model": "/secret/place/base"},
    "data": {"train": {"file": "train.jsonl", "records": 40}},
    "result": {"best_dev_loss": 1.25},
}


class Says(Method):
    """A method that says the first words of the reference, and takes time by its layers."""

    def __init__(self, model: Any, words: int, schedule: Schedule | None = None) -> None:
        super().__init__(Backend(model), schedule)
        self.words = words

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: Any, eos: set[int], **options: Any
    ) -> Generation:
        tokenizer = byte_tokenizer()
        numbers = [int(tokenizer.decode(p).strip(":")) for p in prompts]
        texts = [tokenizer(" ".join(REFERENCES[i].split()[: self.words])).input_ids for i in numbers]
        layers = self.schedule.budget(0)
        lengths = [len(row) for row in texts] if isinstance(max_new_tokens, int) else max_new_tokens
        fed = sum(length - 1 for length in lengths)
        return Generation(texts, 0.1, SECONDS_A_LAYER * layers * fed, layers * fed, fed, fed)


def flat(speedup: int) -> Schedule:
    """A constant schedule, labelled as a method's."""
    return replace(Schedule.constant(LAYERS, LAYERS // speedup), name="", family="flat", speedup=speedup)


def quality_runs(place: Path) -> dict[str, Run]:
    """Runs by directory: full depth says 7 of 8 words, the flat 2x schedule too, the flat 4x one 5."""
    model = tiny_model("llama", vocab_size=259)
    methods: dict[Path, Method] = {
        place / "full": Says(model, 7),
        place / "flat-2x": Says(model, 7, flat(2)),
        place / "flat-4x": Says(model, 5, flat(4)),
    }
    encoder = place / "encoder"
    save_tiny_encoder(encoder, REFERENCES)
    metrics = make_metrics(TASK.metrics, EncoderOptions(str(encoder), 1))
    records = Records(tuple(Record(i, i, f"r{i}", f"{i}:", references=(text,)) for i, text in enumerate(REFERENCES)))
    about = {"model": "/secret/place/checkpoint", "recipe": RECIPE, "data": "d.jsonl", "dtype": "x", "device": "cpu"}
    settings = EvaluationSettings(batch_size=3, resamples=50, max_new_tokens=TASK.max_new_tokens)
    place.mkdir(parents=True, exist_ok=True)
    _, prompts = encode_prompts(TASK.template, records, byte_tokenizer())
    work = TaskEvaluation(model, byte_tokenizer(), TASK, records, prompts, metrics, settings, about)
    runs = work.run(methods, place)
    return dict(zip((path.name for path in methods), runs, strict=True))


def score(run: Run, metric: str) -> float:
    """A score of a run."""
    return float(run.data["metrics"][metric]["score"])
