"""Records with invented names, which `benchmarks/invented_names.py` writes for `tune --train`."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest

from skipdecode.data.records import Record
from skipdecode.data.source import read_file
from skipdecode.data.template import PromptTemplate
from skipdecode.evaluation.metrics import repeated
from tuning_data import write_jsonl

TEMPLATE = PromptTemplate("{mr}\n", ("ref",))
OPTIONS = ["--prompt-template", "{mr}\\n", "--response-field", "ref", "--fields"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("invented_names")


def record(text: str, *references: str) -> Record:
    return Record(0, 1, 1, TEMPLATE.render({"mr": text}), None, {"mr": text}, references)


def test_made_up_names_stand_in_prompt_and_response_alike(script: Any) -> None:
    mr, ref = (
        "name[The Mill], near[Mill Lane], from[1,250]",
        "The Mill near Mill Lane, from 1,250. The Mills are others.",
    )
    first, other = script.with_invented_names([record(mr, ref)], TEMPLATE, ["mr"], seed=0)
    assert (first.prompt, first.references) == (f"{mr}\n", (ref,))
    names = script.invented_names(["The Mill", "Mill Lane", "1,250"], random.Random(0))
    assert other.values == {"mr": f"name[{names['The Mill']}], near[{names['Mill Lane']}], from[{names['1,250']}]"}
    assert other.prompt == f"{other.values['mr']}\n"
    assert other.references == (script.renamed(ref, names),)
    assert other.references[0].endswith("The Mills are others.")
    assert names["The Mill"].startswith("The ")
    assert len(names["1,250"]) == 5
    assert names["1,250"][1] == ","
    assert not set(names) & set(names.values())


def test_every_copy_has_other_names(script: Any) -> None:
    place = record("name[The Mill], near[Mill Lane]", "The Mill near Mill Lane.")
    records = script.with_invented_names([place, record("eatType[pub]", "A pub.")], TEMPLATE, ["mr"], seed=0, copies=3)
    assert len(records) == 2 + 3
    assert len({(one.prompt, one.references) for one in records}) == 5
    assert all(name in one.references[0] for one in records[2:] for name in repeated(one, ["mr"]))
    assert all(len(repeated(one, ["mr"])) == 2 for one in records[2:])


def test_made_up_names_are_of_many_words(script: Any) -> None:
    draw = random.Random(0)
    names = {name for _ in range(1000) for name in script.invented_names(["Bo"], draw).values()}
    assert len({word for name in names for word in name.split()}) > 600


def test_the_file_has_the_records_and_three_copies_of_those_with_names(script: Any, tmp_path: Path) -> None:
    rows = [{"mr": "name[The Mill]", "ref": "The Mill is here."}, {"mr": "eatType[pub]", "ref": "A pub."}]
    data, out = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    script.main(["--data", str(data), "--out", str(out), *OPTIONS, "mr"])
    found = read_file(out, TEMPLATE).items
    wanted = script.with_invented_names(read_file(data, TEMPLATE).items, TEMPLATE, ["mr"], seed=0, copies=3)
    assert len(found) == 2 + 3
    assert [(one.prompt, one.references) for one in found] == [(one.prompt, one.references) for one in wanted]


def test_a_field_that_the_prompt_lacks_is_refused(script: Any, tmp_path: Path, capsys: Any) -> None:
    data = write_jsonl(tmp_path / "in.jsonl", [{"mr": "name[The Mill]", "ref": "The Mill."}])
    with pytest.raises(SystemExit) as refused:
        script.main(["--data", str(data), "--out", str(tmp_path / "out.jsonl"), *OPTIONS, "name"])
    assert refused.value.code == 2
    assert "--fields name: accepted are mr" in capsys.readouterr().err
