"""Writing rows: order, resuming after any kind of end, refusals, and memory that does not grow with the file."""

from __future__ import annotations

import io
import json
import random
import resource
import signal
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from skipdecode.errors import OutputError
from skipdecode.generation.records import FileWriter, StreamWriter, open_writer
from textgen_tools import read_rows

SETTINGS = {"temperature": 0.0, "input": {"path": "in.jsonl", "bytes": 10}}


def writer_for(path: Path, settings: dict[str, Any] = SETTINGS) -> FileWriter:
    writer = open_writer(str(path), settings)
    assert isinstance(writer, FileWriter)
    return writer


def row(index: int) -> dict[str, Any]:
    return {"id": index, "text": f"Zeile {index} – \n\t end"}


def put_rows(writer: FileWriter, count: int) -> None:
    """The rows of 0 to `count` - 1 that are not there yet."""
    for index in range(count):
        if not writer.is_done(index):
            writer.put(index, row(index))


def write_some(path: Path, indices: list[int], **options: Any) -> None:
    writer = writer_for(path, **options)
    for index in indices:
        writer.put(index, row(index))
    writer.close()


def test_output_is_in_input_order_and_leaves_nothing_else(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    writer = writer_for(out)
    for index in random.Random(0).sample(range(50), 50):
        writer.put(index, row(index), bad=index == 3)
    assert not out.exists()
    writer.finish()
    assert read_rows(out) == [row(i) for i in range(50)]
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


def test_going_on_takes_over_what_is_there(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    first = writer_for(out)
    first.put(2, row(2))
    first.put(0, {"error": "x"}, bad=True)
    first.close()
    second = writer_for(out)
    assert (second.rows_before, second.bad_before) == (2, 1)
    assert [second.is_done(i) for i in range(4)] == [True, False, True, False]
    second.put(1, row(1))
    second.finish()
    assert read_rows(out) == [{"error": "x"}, row(1), row(2)]


def test_partial_cut_at_any_byte_loses_no_whole_row(tmp_path: Path):
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    write_some(out, [1, 0, 2])
    data = partial.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data) + 1):
        partial.write_bytes(data[:size])
        whole = sum(end <= size for end in ends[1:])
        writer = writer_for(out)
        assert writer.rows_before == whole
        put_rows(writer, 3)
        writer.finish()
        assert read_rows(out) == [row(i) for i in range(3)]


def test_partial_with_a_hole_of_zeros_is_redone_from_there(tmp_path: Path):
    # What a power cut can leave: the file has its length, but not all of its blocks.
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    write_some(out, [0, 1, 2])
    lines = partial.read_bytes().splitlines(keepends=True)
    partial.write_bytes(lines[0] + lines[1] + b"\0" * len(lines[2]) + lines[3])
    writer = writer_for(out)
    assert [writer.is_done(i) for i in range(3)] == [True, False, False]
    writer.close()


def test_other_settings_are_refused_by_name(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    write_some(out, [0])
    other = {"temperature": 0.7, "input": {"path": "in.jsonl", "bytes": 11}}
    with pytest.raises(OutputError) as refused:
        writer_for(out, other)
    message = str(refused.value)
    assert "temperature: 0.0 then, 0.7 now; input.bytes: 10 then, 11 now" in message
    assert f"delete {out}.partial" in message


def test_refusal_stays_short_however_much_differs(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    write_some(out, [0], settings={f"s{i}": [0] * 1000 for i in range(10)})
    with pytest.raises(OutputError, match="and 7 more") as refused:
        writer_for(out, {f"s{i}": [1] * 1000 for i in range(10)})
    assert len(str(refused.value)) < 700


@pytest.mark.parametrize("content", [b"my own notes\n", b'{"some": "json"}\n', b"no line end"])
def test_file_of_somebody_else_is_left_alone(tmp_path: Path, content: bytes):
    partial = tmp_path / "out.jsonl.partial"
    partial.write_bytes(content)
    with pytest.raises(OutputError, match="holds no finished rows of this version"):
        writer_for(tmp_path / "out.jsonl")
    assert partial.read_bytes() == content


# ---------------------------------------------------------------------- outputs that cannot be


def test_finished_output_is_replaced_at_the_end(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    writer = writer_for(out)
    writer.put(0, row(0))
    assert out.read_text() == "precious\n"
    writer.finish()
    assert read_rows(out) == [row(0)]


def test_full_disk_keeps_all_rows_that_went_through(tmp_path: Path):
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    writer = writer_for(out)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # A limit on file size fails in the middle of a row, as a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(OutputError, match="free disk space, then repeat the command") as full:
            put_rows(writer, 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    writer.close()
    assert partial.read_bytes().endswith(b"\n")
    again = writer_for(out)
    assert again.rows_before > 5
    assert f"{again.rows_before} finished rows are kept" in str(full.value)
    put_rows(again, 100)
    again.finish()
    assert read_rows(out) == [row(i) for i in range(100)]


def test_disk_that_fills_up_at_the_very_end_keeps_all_rows(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    writer = writer_for(out)
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


# ---------------------------------------------------------------------- streams


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


# ---------------------------------------------------------------------- memory


def test_writing_reading_back_and_ordering_do_not_keep_the_rows(tmp_path: Path):
    def peak(rows: int) -> int:
        path = tmp_path / f"{rows}.jsonl"
        shuffled = random.Random(0)
        tracemalloc.start()
        for half in (0, 1):
            writer = FileWriter(path, SETTINGS)
            for window in range(half * rows // 2, (half + 1) * rows // 2, 50):
                for index in shuffled.sample(range(window, window + 50), 50):
                    writer.put(index, {"id": index, "text": "word " * 200})
            writer.finish() if half else writer.close()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert [r["id"] for r in read_rows(path)] == list(range(rows))
        return found

    peak(100)
    # 10,000 rows are 10 MB of output.
    assert peak(10_000) < peak(100) + 100_000
