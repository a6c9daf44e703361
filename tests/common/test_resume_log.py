"""The log of a run: whatever ends the process, nothing that was stored is lost, and nothing of another run is taken."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from skipdecode.common.resume import ResumeLog
from skipdecode.errors import OutputError, WriteError
from textgen_tools import small_disk, subprocess_environment

SETTINGS = {"model": "m", "records": {"sha256": "abc"}}


def opened(path: Path, settings: dict[str, Any] = SETTINGS, **options: Any) -> ResumeLog:
    return ResumeLog(path, settings, what="measurements", remedy="give another --out", **options)


def test_values_come_back_by_key_and_in_the_order_of_the_keys(tmp_path: Path):
    path = tmp_path / "a %20 directory?" / "log#1"
    with closing(opened(path)) as log:
        for key in (10, "b", 9, "a"):
            log.put(key, [key, 0.1, "\ud800 \x85"])
        log.put("b", None)
        log.put(9, {"again": True})
    assert [file.name for file in path.parent.iterdir()] == ["log#1"]
    with closing(opened(path)) as log:
        assert (log.count, log.get("c")) == (4, None)
        expected = [(9, {"again": True}), (10, [10, 0.1, "\ud800 \x85"]), ("a", ["a", 0.1, "\ud800 \x85"]), ("b", None)]
        assert list(log.items()) == expected
        assert [log.get(key) for key, _ in expected] == [value for _, value in expected]


# Stores values until it is killed, and says which are stored.
STORES = """
import sys
from pathlib import Path
from skipdecode.common.resume import ResumeLog
log = ResumeLog(Path(sys.argv[1]), {}, what="entries", remedy="")
number = log.count
while True:
    log.put(number, "x" * (number % 5000))
    print(number, flush=True)
    number += 1
"""


def test_a_kill_at_any_moment_loses_nothing_that_was_stored_and_two_runs_at_once_are_refused(tmp_path: Path):
    path, moments = tmp_path / "log", random.Random(0)
    command = [sys.executable, "-c", STORES, str(path)]
    for _ in range(6):
        with subprocess.Popen(command, env=subprocess_environment(), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            with pytest.raises(OutputError, match="log is being written by another run"):
                opened(path, {}, restart=True)
            time.sleep(moments.random() / 5)
            process.kill()
            stored = int(process.stdout.read().split()[-1]) + 1
        with closing(opened(path, {})) as log:
            assert log.count in (stored, stored + 1)  # it was killed before it could say so
            assert [(key, len(value)) for key, value in log.items()] == [(n, n % 5000) for n in range(log.count)]


def test_a_log_cut_at_any_byte_has_what_was_stored_before(tmp_path: Path):
    path, cut, counts = tmp_path / "log", tmp_path / "cut", []
    with closing(opened(path)) as log:
        for number in range(8):
            log.put(number, number)
        whole, later = path.read_bytes(), Path(f"{path}-wal").read_bytes()
    for size in range(0, len(later) + 1, 911):
        cut.write_bytes(whole)
        Path(f"{cut}-wal").write_bytes(later[:size])
        with closing(opened(cut)) as log:
            assert list(log.items()) == [(number, number) for number in range(log.count)]
            counts.append(log.count)
    assert counts == sorted(counts)
    assert {*counts} >= {0, *range(2, 8)}
    # Of a file that a user has deleted alone, nothing is taken.
    Path(f"{cut}-wal").write_bytes(later)
    cut.unlink(missing_ok=True)
    with closing(opened(cut)) as log:
        assert log.count == 0


def test_another_run_is_refused_by_what_differs_or_its_entries_are_dropped(tmp_path: Path):
    path, other = tmp_path / "log", SETTINGS | {"model": "n"}
    with closing(opened(path)) as log:
        log.put("a", 1)
    with pytest.raises(OutputError, match=r'model: "m" then, "n" now\): repeat those to continue, or give another'):
        opened(path, other)
    with pytest.raises(OutputError, match="and 7 more") as refused:
        opened(path, SETTINGS | {f"s{i}": [1] * 1000 for i in range(10)})
    assert len(str(refused.value)) < 700
    with closing(opened(path, restart=True)) as log:
        assert log.get("a") == 1
    with closing(opened(path, other, restart=True)) as log:
        assert log.count == 0
        log.put("b", 2)
    with closing(opened(path, other)) as log:
        assert list(log.items()) == [("b", 2)]


def test_without_an_entry_nothing_is_left_that_a_corrected_command_would_have_to_match(tmp_path: Path):
    opened(tmp_path / "new" / "log").close()
    assert not list((tmp_path / "new").iterdir())
    log = opened(tmp_path / "log")
    log.put("a", 1)
    log.remove()
    log.close()
    assert [file.name for file in tmp_path.iterdir()] == ["new"]


def test_full_disk_keeps_what_was_stored(tmp_path: Path):
    log = opened(tmp_path / "log")
    with small_disk(200_000):
        with pytest.raises(WriteError, match="measurements are kept in it: free disk space") as full:  # noqa: PT012
            for number in range(1000):
                log.put(number, "x" * number)
        with pytest.raises(OutputError, match="cannot write"):
            opened(tmp_path / "other").put("a", "x" * 300_000)
    log.close()
    with closing(opened(tmp_path / "log")) as log:
        assert f"{log.count} measurements are kept" in str(full.value)
        assert log.count > 5
        assert list(log.items()) == [(number, "x" * number) for number in range(log.count)]
        log.put("more", 1)


def test_what_is_no_log_stays_as_it_is(tmp_path: Path):
    path = tmp_path / "log"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE mine (value)")
    for content in (b"my own notes\n", b'{"some": "json"}\n', path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(
            OutputError, match=r"holds no measurements of this version \((file is not|no such).*\): move it away$"
        ):
            opened(path, restart=True)
        assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["log"]


def test_a_log_of_an_older_version_is_refused_with_what_to_do_or_replaced(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(b'{"skipdecode_partial":1,"settings":{"model":"m"}}\n["a",1]\n')
    with pytest.raises(OutputError, match="holds no measurements of this version: move it away, or give another --out"):
        opened(path)
    with closing(opened(path, restart=True)) as log:
        assert log.count == 0


def test_a_damaged_log_is_one_line(tmp_path: Path):
    path = tmp_path / "log"
    with closing(opened(path)) as log:
        for number in range(100):
            log.put(number, "x" * 1000)
    content = path.read_bytes()
    path.write_bytes(content[:8192] + b"\xff" * 20_000 + content[28_192:])
    with pytest.raises(OutputError, match="move it away"), closing(opened(path)) as log:
        list(log.items())
