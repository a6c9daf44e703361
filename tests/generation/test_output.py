"""Writing rows: in the order of the input, and kept where the end fails."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from skipdecode.errors import OutputError
from skipdecode.generation.output_files import FileWriter, StreamWriter, open_writer
from textgen_tools import read_rows

SETTINGS = {"temperature": 0.0, "input": {"path": "in.jsonl", "bytes": 10}}


def writer_for(path: Path) -> FileWriter:
    writer = open_writer(str(path), SETTINGS)
    assert isinstance(writer, FileWriter)
    return writer


def row(index: int) -> dict[str, Any]:
    return {"id": index, "text": f"Zeile {index} – \n\t end"}


def test_output_is_in_input_order_replaces_a_file_at_the_end_and_leaves_nothing_else(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    writer = writer_for(out)
    for index in random.Random(0).sample(range(50), 50):
        writer.put(index, row(index), bad=index == 3)
    assert out.read_text() == "precious\n"
    writer.finish()
    assert read_rows(out) == [row(i) for i in range(50)]
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


def test_disk_that_fills_up_at_the_very_end_keeps_all_rows(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    writer = writer_for(out)
    assert str(tmp_path) not in writer.resume_hint  # a log without rows is not kept
    writer.put(0, row(0))
    out.mkdir()
    with pytest.raises(OutputError, match=r"1 finished rows are kept in .*partial; the same command goes on"):
        writer.finish()
    writer.close()
    out.rmdir()
    again = writer_for(out)
    assert again.is_done(0)
    again.finish()
    assert read_rows(out) == [row(0)]


def test_stream_gets_rows_in_order_each_as_soon_as_it_may():
    stream = io.BytesIO()
    writer = StreamWriter(stream, "test")
    seen = []
    for index in (1, 0, 3, 2):
        writer.put(index, row(index))
        seen.append(stream.getvalue().count(b"\n"))
    assert seen == [0, 2, 2, 4]
    assert [json.loads(x) for x in stream.getvalue().decode().splitlines()] == [row(i) for i in range(4)]
    writer.put(4, row(4) | {"text": "a\x85b\u2028c\u2029d"})
    assert json.loads(stream.getvalue().decode().splitlines()[-1])["text"] == "a\x85b\u2028c\u2029d"


def test_interrupted_stream_still_gets_rows_that_waited(tmp_path: Path):
    out = tmp_path / "pipe"
    stream = out.open("wb")
    writer = StreamWriter(stream, "test")
    writer.put(2, row(2))
    writer.put(1, row(1))
    writer.close()
    assert read_rows(out) == [row(1), row(2)]
    assert "output file" in writer.resume_hint
