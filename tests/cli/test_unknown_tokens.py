"""Tokens of a tokenizer without a row in the model: one line where a text has one; padding needs no row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skipdecode
from checkpoints import byte_tokenizer
from skipdecode.cli import main
from skipdecode.errors import DataError
from tiny import tiny_model

WORD, NUMBER = "[X]", 259
FORM = "--prompt-field prompt --response-field response"
VERBS = {
    "tune": f"--train x.jsonl --dev x.jsonl {FORM} --steps 1 --schedule 2x",
    "eval": "--task jsonl --data x.jsonl --max-new-tokens 2 --metrics rougeL --schedule 2x",
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Saves a model of 259 rows, with a tokenizer of 260 tokens."""
    monkeypatch.chdir(tmp_path)

    def save(**added: str) -> str:
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens(added) if added else tokenizer.add_tokens([WORD])
        tiny_model("llama", vocab_size=NUMBER).save_pretrained("model")
        tokenizer.save_pretrained("model")
        return "model"

    return save


def records(**last: str) -> None:
    rows = [{"prompt": "say " + c * n, "response": c * n, "reference": c} for n, c in enumerate("abcd", 1)]
    rows.append(rows[0] | last)
    Path("x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("field", ["prompt", "response"])
def test_a_record_with_an_unknown_token_is_refused_by_its_line(
    model: Callable[..., str], verb: str, field: str, capsys: Any
) -> None:
    word = "reference" if (verb, field) == ("eval", "response") else field
    records(**{word: f"a{WORD}"})
    assert main([verb, model(), *VERBS[verb].split(), "--out", "out"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "line 5" in told
    assert f"{NUMBER} ('{WORD}')" in told


def test_a_padding_token_needs_no_row(model: Callable[..., str]) -> None:
    records()
    assert main(["tune", model(pad_token="[PAD]"), *VERBS["tune"].split(), "--out", "out"]) == 0


def test_other_records_are_generated(model: Callable[..., str], capsys: Any) -> None:
    records(prompt=f"a{WORD}")
    assert main(["generate", model(), "--input", "x.jsonl", "--max-new-tokens", "2", "--output", "out.jsonl"]) == 1
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [("error" in row, row.get("line")) for row in rows] == [(False, None)] * 4 + [(True, 5)]
    assert f"{NUMBER} ('{WORD}')" in rows[-1]["error"]


def test_in_python_the_prompt_is_named(model: Callable[..., str]) -> None:
    llm = skipdecode.LLM(model())
    with pytest.raises(DataError, match=str(NUMBER)) as caught:
        llm.generate(["a", f"a{WORD}"], max_new_tokens=2)
    assert caught.value.index == 1


def test_a_file_for_llama_cpp_has_a_row_for_each_token(model: Callable[..., str], capsys: Any) -> None:
    pytest.importorskip("gguf")
    assert main(["export", model(), "--format", "gguf", "--out", "out"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"{NUMBER} ('{WORD}')" in told
    assert str(NUMBER) in told
