"""Greedy answers with the distributions they were chosen from, which a student learns without running a teacher."""

from __future__ import annotations

import math
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from skipdecode import Schedule, attach
from skipdecode.common.resume import ResumeLog
from skipdecode.common.rows import read_rows
from skipdecode.data.batches import collate
from skipdecode.data.examples import Example
from skipdecode.engine.opening import load, open_engines
from skipdecode.learning import answers
from skipdecode.learning.answers import TOP_K, greedy_answers
from skipdecode.learning.distributions import load_distributions, save_distributions, text_key
from skipdecode.learning.objective import Teacher
from skipdecode.learning.settings import PrepareOptions
from skipdecode.learning.sources import Sources
from tiny import LAYERS, tiny_model
from tuning_data import records, save_model

PROMPTS = [(5, 6, 7), (9, 4), (3, 8, 8, 5), (7,), (11, 12)]
TOKENS = 6


def answered(model: Any, path: Path, prompts: Any = PROMPTS, **options: Any) -> Any:
    backend = open_engines(model, "auto", lambda text: None)
    with closing(ResumeLog(path, {}, what="answers", remedy="")) as log:
        return list(greedy_answers(backend, prompts, log, max_new_tokens=TOKENS, ends=(), **options))


def in_pairs(count: int) -> list[dict[str, Any]]:
    """Records, each colour of which stands in two."""
    return [row | {"colour": f"{row['colour']} {number // 2}"} for number, row in enumerate(records(count))]


def test_answers_have_the_distributions_that_the_teacher_computes(tmp_path: Path) -> None:
    model = tiny_model("llama")
    answers = answered(model, tmp_path / "log")
    texts = {text_key(p, tokens): taught for p, (tokens, taught) in zip(PROMPTS, answers, strict=True)}
    save_distributions(tmp_path / "file", texts)
    known = load_distributions(tmp_path / "file")
    batch = collate([Example(str(p), p, tuple(tokens)) for p, (tokens, _) in zip(PROMPTS, answers, strict=True)])
    with attach(model, Schedule.full(LAYERS)) as attachment:
        computed = Teacher(attachment, model, top_k=TOP_K).taught(batch)
        silent: Any = None  # a teacher that would fail if it were asked
        stored = Teacher(silent, silent, top_k=1, known=known).taught(batch)
    torch.testing.assert_close(stored.log_probabilities, computed.log_probabilities, atol=2e-3, rtol=2e-3)
    assert (stored.top_tokens == computed.top_tokens).float().mean() > 0.98  # equals may change places


def test_answers_go_on_and_end_at_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_AT_ONCE", 2)
    model = tiny_model("llama")
    first = answered(model, tmp_path / "log", until=time.perf_counter())
    assert len(first) == 2  # the first ones are always answered
    with torch.no_grad():
        model.lm_head.weight.zero_()  # would show if they ran again
    whole = answered(model, tmp_path / "log")
    assert len(whole) == len(PROMPTS)
    for (tokens, taught), (again, other) in zip(first, whole, strict=False):
        assert tokens == again
        assert torch.equal(taught.top_tokens, other.top_tokens)
    assert all(set(tokens) == {0} for tokens, _ in whole[2:])


def test_a_prompt_of_several_records_is_answered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "is_repetitive", lambda tokens: False)
    form = {"prompt_template": "{colour} {thing}", "response_field": "ref"}
    settings, loaded = PrepareOptions(**form), load(save_model(tmp_path / "model"))
    rows = Sources(settings, {"train": in_pairs(80)}, tmp_path)
    learned = rows.answer_records(rows.written_records(loaded), loaded, math.inf)
    texts = [row for path in (learned.train, learned.dev) for _, row in read_rows(path)]
    prompts = [(row["colour"], row["thing"]) for row in texts if isinstance(row, dict)]
    assert 20 < len(prompts) == len(set(prompts))


def test_answers_that_loop_up_to_the_limit_are_not_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    form = {"prompt_template": "{colour} {thing}", "response_field": "ref"}
    settings, loaded = PrepareOptions(**form), load(save_model(tmp_path / "model"))
    rows = Sources(settings, {"train": in_pairs(48)[::2]}, tmp_path)
    with torch.no_grad():
        loaded.model.get_output_embeddings().weight.zero_()
    responses = rows.written_records(loaded)
    assert rows.answer_records(responses, loaded, math.inf) == responses
    noted = capsys.readouterr().err
    assert "21 answers are left out: they repeat themselves up to the limit of" in noted
    assert "0 prompts are answered in time" in noted


def test_groups_of_another_size_are_answered_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(answers, "_AT_ONCE", 2)
    assert len(answered(model, tmp_path / "log", until=time.perf_counter())) == 2
    monkeypatch.setattr(answers, "_AT_ONCE", 3)
    again = [tokens for tokens, _ in answered(model, tmp_path / "log")]
    assert again == [tokens for tokens, _ in answered(model, tmp_path / "other")]
