"""What Python users hand over: tables, arrays and numbers of other libraries, read in one way."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from skipdecode import LLM, Schedule, calibrate, evaluate, tune
from skipdecode.common.plain import listed
from skipdecode.engine import Sampling
from skipdecode.errors import DataError, OptionError
from textgen_tools import save_tiny_model

ROWS = [{"prompt": "abc", "n": 1}, {"prompt": "def", "n": 2}]
DATASET = datasets.Dataset.from_list(ROWS)


TABLES: dict[str, Any] = {
    "list": ROWS,
    "tuple": tuple(ROWS),
    "generator": (row for row in ROWS),
    "pandas": pd.DataFrame(ROWS, index=["x", "y"]),
    "arrow": pa.Table.from_pylist(ROWS),
    "arrow's reader": pa.Table.from_pylist(ROWS).to_reader(),
    "dataset": DATASET,
    "formatted dataset": DATASET.with_format("torch"),
    "iterable dataset": DATASET.to_iterable_dataset(),
}


class Indexed(torch.utils.data.Dataset[dict[str, Any]]):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return ROWS[index]


TABLES["torch's dataset"] = Indexed()


@pytest.mark.parametrize("kind", TABLES)
def test_rows_of_every_table_are_records(kind: str):
    assert listed(TABLES[kind]) == ROWS


def test_objects_of_a_table_have_no_fields_of_others():
    table = pa.table({"tools": [[{"a": {"x": 1}}, {"b": 2}]]})
    for given in (table, table.to_pandas(), datasets.Dataset(table)):
        assert listed(given) == [{"tools": [{"a": {"x": 1}}, {"b": 2}]}]
    own = [{"tools": [{"default": None}]}]
    assert listed(own) == own


def test_datasets_keep_what_their_user_chose():
    louder = DATASET.with_transform(lambda rows: {"prompt": [text.upper() for text in rows["prompt"]]})
    assert listed(louder) == [{"prompt": "ABC"}, {"prompt": "DEF"}]
    assert listed(DATASET.with_format("numpy", columns=["prompt"])) == [{"prompt": "abc"}, {"prompt": "def"}]


def test_values_of_records_are_those_of_json():
    values = {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), "d": torch.tensor(2), "e": [np.str_("x")]}
    assert listed([values]) == [{"a": 0.5, "b": 3, "c": True, "d": 2, "e": ["x"]}]
    missing = pd.DataFrame({"a": [None, 1.5], "b": pd.array([None, 1], "Int64"), "c": [pd.NaT, pd.Timestamp(0)]})
    assert listed(missing)[0] == {"a": None, "b": None, "c": None}
    assert listed(missing)[1] == {"a": 1.5, "b": 1, "c": "1970-01-01 00:00:00"}
    assert listed(np.array(["x", "y"])) == listed(pd.Series(["x", "y"])) == listed(pa.array(["x", "y"])) == ["x", "y"]
    assert listed(np.array("x")) == listed([pa.scalar("x")]) == ["x"]
    assert listed([{"a": pd.Timedelta(1, "s")}]) == [{"a": "0 days 00:00:01"}]
    assert listed([{"a": b"x", "b": b"\x89PNG"}]) == [{"a": "x", "b": None}]
    for wrong in (b"text", 5):
        with pytest.raises(OptionError):
            listed(wrong)
    twice = pd.DataFrame([["a", "b"]], columns=["x", "x"]), pa.table([["a"], ["b"]], names=["x", "x"])
    for refused in (datasets.DatasetDict(train=DATASET), *twice, twice[1].to_reader()):
        with pytest.raises(DataError):
            listed(refused)


def test_numbers_of_numpy_and_torch_are_options():
    wrapped = Sampling(temperature=np.float32(0.5), seed=np.int64(1), top_k=torch.tensor(3))
    assert wrapped == Sampling(temperature=0.5, seed=1, top_k=3)
    assert Sampling(logit_bias={np.int64(7): np.float32(2)}).logit_bias == {7: 2.0}
    with pytest.raises(OptionError):
        Sampling(top_k=np.bool_(True))
    plain = Schedule.from_speedup(num_layers=8, nominal_speedup=2, seq_len=4)
    made = Schedule.from_speedup(num_layers=np.int64(8), nominal_speedup=np.float32(2), seq_len=np.int32(4))
    assert made == plain
    assert made.to_dict() == plain.to_dict()


def test_tables_are_taken_by_every_verb(tmp_path: Any):
    model = save_tiny_model(tmp_path / "model")
    llm = LLM(model)
    options: dict[str, Any] = {"max_new_tokens": np.int64(2), "template": False}
    outputs = llm.generate(ROWS, **options)
    assert [output.prompt for output in llm.generate(pd.DataFrame(ROWS), **options)] == ["abc", "def"]
    ids = llm.tokenizer([row["prompt"] for row in ROWS]).input_ids
    for prompts in (ids, np.array(ids), [{"prompt_token_ids": row} for row in ids], torch.tensor(ids)):
        assert llm.generate(prompts, **options) == outputs
    assert llm.generate(ids[0], **options) == outputs[:1]
    wrapped = {"exact": np.bool_(True), "template": np.bool_(False), "stop": np.array(["never said"])}
    assert llm.generate(ROWS, np.int64(2), **wrapped) == outputs
    for wrong in (None, 0.5, tmp_path, ("abc", 1), ["abc"]):
        with pytest.raises(DataError, match=r"prompts\[1\]: the prompt is "):
            llm.generate(["abc", wrong], **options)
    for wrong in ([-1], [10**12], [True]):
        with pytest.raises(DataError):
            llm.generate([wrong], **options)
    pairs = pd.DataFrame([{"prompt": f"say {i}", "response": f"xyz {i}", "picture": object()} for i in range(12)])
    assert tune(llm, pairs, out=tmp_path / "tuned", schedule="2x", steps=np.int64(1)).path.is_dir()
    found = calibrate(llm, pairs, nominal_speedup=np.float32(2), records=4, fit=False)
    assert found.schedule.num_layers == llm.num_layers
    scores = evaluate(llm, pairs, "2x", metrics=("rougeL",), max_new_tokens=2, limit=np.int64(2), full_depth=False)
    assert scores.runs[0].data["n"] == 2
