"""Rows of files: CSV and TSV read as JSON lines are, with the lines that rows begin on; other kinds refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from skipdecode.cli import main
from skipdecode.common.rows import read_rows
from skipdecode.data.source import PromptSource, load_records
from skipdecode.data.tasks import load_task
from skipdecode.errors import DataError
from textgen_tools import save_tiny_model


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        (
            "x.csv",
            '\ufeffid, text\r\na,"one\ntwo, ""x"""\n\nb,\n',
            {2: {"id": "a", "text": 'one\ntwo, "x"'}, 5: {"id": "b", "text": ""}},
        ),
        ("x.TSV", "a\tb\n1,5\t2\n", {2: {"a": "1,5", "b": "2"}}),
        # Delimiters of spreadsheets.
        ("x.csv", "prompt;note\nab;x, y\n", {2: {"prompt": "ab", "note": "x, y"}}),
        ("x.csv", '"prompt";"note, if any"\r\n"ab";"x, y"\r\n', {2: {"prompt": "ab", "note, if any": "x, y"}}),
        ("x.csv", "prompt\tnote\nab\tx, y\n", {2: {"prompt": "ab", "note": "x, y"}}),
        ("x.csv", "prompt|note\nab|x, y\n", {2: {"prompt": "ab", "note": "x, y"}}),
        # A semicolon in a header with commas, or in the only column, is text.
        ("x.csv", "a;b,c\n1;2,3\n", {2: {"a;b": "1;2", "c": "3"}}),
        ("x.csv", "text\n1;2\n", {2: {"text": "1;2"}}),
        ("x.csv", "sep=;\nprompt;note;;\nab;;;\n", {3: {"prompt": "ab", "note": ""}}),
        # Empty cells are a record, a blank line is none.
        ("x.csv", 'prompt\nab\n""\n\ncd\n', {2: {"prompt": "ab"}, 3: {"prompt": ""}, 5: {"prompt": "cd"}}),
        ("x.csv", "a,b\n,\n1,2\n", {2: {"a": "", "b": ""}, 3: {"a": "1", "b": "2"}}),
    ],
)
def test_rows_have_names_and_lines(tmp_path: Path, name: str, text: str, rows: dict[int, Any]):
    assert list(read_rows(written(tmp_path / name, text))) == [*rows.items()]


def test_a_bad_row_is_told_and_those_after_it_are_read(tmp_path: Path):
    text = b'a,b\n"x\ny",1\n1,2,3\n\xff,2\n"z"z,2\nlast,"one\n'
    rows = dict(read_rows(written(tmp_path / "x.csv", text)))
    assert list(rows) == [2, 4, 5, 6, 7]
    assert rows[2] == {"a": "x\ny", "b": "1"}
    assert all(isinstance(rows[line], DataError) for line in (4, 5, 6, 7))


def test_a_bad_row_says_its_lines_and_one_that_hides_others_is_refused(tmp_path: Path):
    few = b'a,b\n"x,1\ny,2\nz",3,4\nlast,5\n'
    rows = dict(read_rows(written(tmp_path / "x.csv", few)))
    assert str(rows[2]).endswith("has 3 lines")
    assert rows[5] == {"a": "last", "b": "5"}
    tabs = b'a\tb\n"x\t1\ny"\t2\nlast\t5\n'  # two fields, of two records
    rows = dict(read_rows(written(tmp_path / "x.tsv", tabs)))
    assert str(rows[2]).endswith("has 2 lines")
    for name, delimiter in (("x.csv", ","), ("x.tsv", "\t")):
        lines = [delimiter.join(("a", "b")), *(delimiter.join((f"r{i}", f"text {i}")) for i in range(998))]
        lines[3] = delimiter.join(("r2", '"text'))
        with pytest.raises(DataError, match="has 996 lines") as refused:
            list(read_rows(written(tmp_path / name, "\n".join(lines) + "\n")))
        assert refused.value.line == 4


@pytest.mark.parametrize("command", ["generate {model} --input", "tune {model} {tune} --dev {file} --train"])
def test_an_open_quote_is_refused_by_those_that_skip_bad_records_too(tmp_path: Path, capsys: Any, command: str):
    rows = ['"text,A.' if i == 3 else f"text {i},A." for i in range(40)]
    file = written(tmp_path / "in.csv", "\n".join(["prompt,ref", *rows]) + "\n")
    model = save_tiny_model(tmp_path / "model")
    tune = f"--prompt-field prompt --response-field ref --bad-records skip --full --out {tmp_path}/out"
    words = command.format(model=model, tune=tune, file=file).split()
    assert main([*words, str(file)]) == 2
    assert "line 5: not CSV" in (told := capsys.readouterr().err)
    assert "has 37 lines" in told


def test_only_records_within_the_limit_are_refused(tmp_path: Path):
    task = load_task("e2e")
    lines = [f'{{"mr": "name[{name}]", "ref": "{name}."}}' for name in "AABAC"]
    data = written(tmp_path / "x.jsonl", "\n".join([*lines, "broken"]) + "\n")
    found = load_records(task, data, limit=2)
    assert [record.references for record in found.items] == [("A.", "A.", "A."), ("B.",)]
    with pytest.raises(DataError, match="line 6"):
        load_records(task, data)
    apart = replace(task, merge_same_prompt=False)
    assert [record.line for record in load_records(apart, data, limit=5).items] == [1, 2, 3, 4, 5]
    data = written(tmp_path / "x.jsonl", "\n".join([lines[0], "broken", *lines]) + "\n")
    with pytest.raises(DataError, match="line 2"):
        load_records(apart, data, limit=2)


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.csv"])
def test_old_line_ends_are_refused_by_name(tmp_path: Path, name: str):
    lines = b'{"prompt": "a"}\r{"prompt": "b"}\r'
    with pytest.raises(DataError, match="CR alone"):
        PromptSource.open(str(written(tmp_path / name, lines)))
    whole = written(tmp_path / "z.txt", lines.replace(b"\r", b"\r\n"))
    assert PromptSource.open(str(whole)).count()[0] == 2
    long = written(tmp_path / "y.txt", b"a\rb" + b"x" * 9999 + b"\ny\n")
    assert PromptSource.open(str(long)).count()[0] == 2


def test_a_header_without_rows_is_told(tmp_path: Path):
    texts = {"x.csv": "prompt,note\n", "x.txt": "\n", "x.json": "[]\n"}
    for name, what in (("x.csv", "behind its header"), ("x.txt", "not blank"), ("x.json", "no record$")):
        file = written(tmp_path / name, texts[name])
        with pytest.raises(DataError, match=what):
            PromptSource.open(str(file)).count()


@pytest.mark.parametrize("header", ["a,,b\n1,2,3\n", "a,a\n1,2\n", '"a"b,c\n1,2\n'])
def test_a_header_that_does_not_name_each_column_is_refused(tmp_path: Path, header: str):
    with pytest.raises(DataError) as refused:
        list(read_rows(written(tmp_path / "x.csv", header)))
    assert refused.value.line == 1


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("x.jsonl.gz", b"\x1f\x8b\x08"),
        ("x.xlsx", b"PK\x03\x04"),
        ("x.feather", b"FEA1"),
        ("x.pkl", b"\x80\x05\x95\0"),
        ("x.csv", "id,text\n1,a\n".encode("utf-16")),
        ("x.jsonl", '{"prompt": "a"}\n'.encode("utf-16-le")),
    ],
)
def test_files_that_are_not_read_are_refused_by_name(tmp_path: Path, name: str, start: bytes):
    path = written(tmp_path / name, start + b"\n" * 9)
    with pytest.raises(DataError, match=name):
        list(read_rows(path))
    with pytest.raises(DataError, match=name):
        PromptSource.open(str(path))


@pytest.mark.parametrize("what", [{"prompt": "a"}, {"data": [{"prompt": "a"}]}])
def test_an_object_in_several_lines_is_told(tmp_path: Path, what: Any):
    file = written(tmp_path / "x.json", json.dumps(what, indent=1))
    for read in (lambda: PromptSource.open(str(file)).count(), lambda: list(read_rows(file))):
        with pytest.raises(DataError, match="one JSON object in several lines"):
            read()


def test_a_long_first_line_may_have_a_bracket_anywhere(tmp_path: Path):
    rows = [{"prompt": "[" * 5000}, {"prompt": "a"}]
    file = written(tmp_path / "x.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert [row for _, row in read_rows(file)] == rows


def test_generate_reads_csv_of_any_name_and_names_its_bad_rows(tmp_path: Path, capsys: Any):
    model = save_tiny_model(tmp_path / "model")
    data = written(tmp_path / "in.txt", 'id,prompt\na,"x\ny"\nb,1,2\nc,z\n')
    assert main(["generate", model, "--input", str(data), "--format", "csv", "--max-new-tokens", "2"]) == 1
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [(row["id"], row.get("line")) for row in rows] == [("a", None), ("b", 4), ("c", None)]
    assert "line 4: " in printed.err


def test_other_encodings_have_a_remedy(tmp_path: Path):
    for name, text in (("x.csv", "größe,text\n1,a\n"), ("y.csv", "text,n\nß,1\n"), ("z.jsonl", '{"text": "ß"}\n')):
        path = written(tmp_path / name, text.encode("latin1"))
        with pytest.raises(DataError, match=r"not UTF-8.*iconv"):
            raise next(row for _, row in read_rows(path) if isinstance(row, DataError))


# ---------------------------------------------------------------------- files of pandas and datasets

ROWS = [{"prompt": "abc", "n": 1}, {"prompt": "def", "n": 2}]
FRAME = pd.DataFrame(ROWS, index=[7, 9])
BYTES = [b"abc", b"def"]


def saved(path: Path) -> Path:
    folder = path.with_suffix("") if path.suffix else path
    datasets.Dataset.from_list(ROWS).save_to_disk(folder)
    return folder


WRITERS: dict[str, Callable[[Path], object]] = {
    "x.csv": lambda path: FRAME.astype(str).to_csv(path),
    "levels.tsv": lambda path: FRAME.astype(str).set_index([[1, 2], [3, 4]]).to_csv(path, sep="\t"),
    "mark.csv": lambda path: FRAME.astype(str).to_csv(path, encoding="utf-8-sig", lineterminator="\r\n"),
    "columns.json": lambda path: FRAME.to_json(path, indent=2),
    "index.json": lambda path: FRAME.to_json(path, orient="index"),
    "split.json": lambda path: FRAME.to_json(path, orient="split"),
    "table.json": lambda path: FRAME.to_json(path, orient="table"),
    "x.parquet": lambda path: FRAME.to_parquet(path),
    "x.feather": lambda path: FRAME.reset_index(drop=True).to_feather(path),
    "shard.arrow": lambda path: shutil.copy(saved(path) / "data-00000-of-00001.arrow", path),
    "saved": saved,
    "shards": lambda path: [
        path.mkdir(exist_ok=True),
        *(FRAME[n : n + 1].to_parquet(path / f"part-{n}.parquet") for n in (0, 1)),
    ],
    "bytes": lambda path: [
        path.mkdir(exist_ok=True),
        *(FRAME[n : n + 1].assign(prompt=text).to_parquet(path / f"{n}.parquet") for n, text in enumerate(BYTES)),
    ],
}


@pytest.mark.parametrize("name", WRITERS)
def test_files_of_pandas_and_datasets_are_read(tmp_path: Path, name: str):
    WRITERS[name](tmp_path / name)
    rows = [row for _, row in read_rows(tmp_path / name)]
    assert [{**row, "n": int(row["n"])} for row in rows] == ROWS
    source = PromptSource.open(str(tmp_path / name))
    assert [record.prompt for record in source.records()] == ["abc", "def"]
    assert source.count()[0] == 2


def test_what_may_be_two_tables_is_refused_by_name(tmp_path: Path):
    for write, name in ((pyarrow.parquet.write_table, "x.parquet"), (pyarrow.feather.write_feather, "x.arrow")):
        write(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["x", "x"]), tmp_path / name)
        with pytest.raises(DataError, match="twice"):
            list(read_rows(tmp_path / name))
    FRAME.set_axis(["x", "y"]).to_json(tmp_path / "labels.json")
    with pytest.raises(DataError, match="orient='records'"):
        list(read_rows(tmp_path / "labels.json"))
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(tmp_path / "splits")
    assert [row for _, row in read_rows(tmp_path / "splits:train")] == ROWS
    for name, remedy in (("splits", "splits:train"), (f"{saved(tmp_path / 'one')}:train", "has no splits: give")):
        with pytest.raises(DataError, match=remedy):
            list(read_rows(tmp_path / name))
    for split in ("train", "test"):
        FRAME.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    with pytest.raises(DataError, match="is a directory"):
        list(read_rows(tmp_path))
