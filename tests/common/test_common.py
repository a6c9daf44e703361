"""What every room uses: values kept while a run goes on, names imported on first use, freed memory.

Rows of `skipdecode generate` are in a journal too: tests/data/test_output.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skipdecode.common.files import copy_files
from skipdecode.common.journal import KeptValues, is_begun
from skipdecode.common.registry import Registry
from skipdecode.errors import OutputError, UsageError

SETTINGS = {"model": "m", "records": {"sha256": "abc"}}


def opened(path: Path, settings: dict[str, Any] = SETTINGS, **options: Any) -> KeptValues:
    return KeptValues(path, settings, pieces="measurements", remedy="give another --out", **options)


def test_values_come_back_and_half_a_line_is_dropped(tmp_path: Path):
    path = tmp_path / "measured.jsonl"
    store = opened(path)
    store.put("a", [1.5, 2.0])
    assert store.get("a") == [1.5, 2.0]
    store.close()
    path.write_bytes(path.read_bytes() + b'["b", [0.')
    again = opened(path)
    assert (again.count, again.get("a"), again.get("b")) == (1, [1.5, 2.0], None)
    again.put("b", [0.25])
    again.close()
    assert [json.loads(line) for line in path.read_text().splitlines()][1:] == [["a", [1.5, 2.0]], ["b", [0.25]]]


@pytest.mark.parametrize("junk", ["5", '"ab"', '["a"]', "[[1], 2]", "{}", "null"])
def test_a_line_that_is_no_pair_is_dropped_like_half_a_line(tmp_path: Path, junk: str):
    path = tmp_path / "measured.jsonl"
    store = opened(path)
    store.put("a", [1.5])
    store.close()
    path.write_text(path.read_text() + junk + "\n")
    again = opened(path)
    assert (again.count, again.get("a")) == (1, [1.5])
    again.close()
    assert junk not in path.read_text().splitlines()


def test_values_of_another_run_are_refused_by_what_differs_or_dropped(tmp_path: Path):
    path = tmp_path / "measured.jsonl"
    store = opened(path)
    store.put("a", 1)
    store.close()
    other = SETTINGS | {"model": "n"}
    assert is_begun(path, SETTINGS)
    assert not is_begun(path, other)
    with pytest.raises(OutputError, match=r'model: "m" then, "n" now\): use those to continue, or give another --out'):
        opened(path, other)
    dropped = opened(path, other, restart=True)
    assert dropped.get("a") is None
    dropped.put("b", 2)
    dropped.close()
    assert is_begun(path, other)
    opened(path, SETTINGS, restart=True).close()  # without a value there is nothing to go on with
    assert not path.exists()


@pytest.mark.parametrize("content", ["hello\n", '{"format": 1, "model": "m"}\n', "[1]\n"])
def test_a_file_of_another_kind_is_refused_and_left_alone(tmp_path: Path, content: str):
    path = tmp_path / "measured.jsonl"
    path.write_text(content)
    with pytest.raises(OutputError, match="holds no measurements of this version: move it away"):
        opened(path)
    assert path.read_text() == content


# ---------------------------------------------------------------------- names


def test_get_imports_only_what_is_asked_for():
    registry = Registry("thing", {"sqrt": "math:sqrt", "broken": "no_such_module:x"})
    assert registry.get("sqrt")(9) == 3
    assert "no_such_module" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        registry.get("broken")


def test_unknown_name_lists_the_choices_and_the_nearest():
    registry = Registry("metric", {"bleu": "a:b", "chrf": "a:c"})
    with pytest.raises(UsageError, match=r"unknown metric 'blue' \(did you mean 'bleu'\?\): accepted are bleu, chrf"):
        registry.get("blue")


# ---------------------------------------------------------------------- freed memory

USE_MEMORY = """
import ctypes, platform, resource
from skipdecode.common.allocator import keep_freed_memory
done = keep_freed_memory()
import mmap
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    b = bytearray(64 << 20)
    return len(b)
use()
before = faults()
for _ in range(5):
    use()
print(done, faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc of the GNU C library")
def test_large_blocks_of_freed_memory_are_not_faulted_in_again():
    done, faults = subprocess.run(
        [sys.executable, "-c", USE_MEMORY], capture_output=True, text=True, check=True
    ).stdout.split()
    # 64 MiB are 16,384 pages; returned to the kernel in between, five uses would fault them all five times.
    assert done == "True"
    assert int(faults) < 2000


def test_what_is_copied_may_have_directories_in_it(tmp_path: Path):
    """As a tokenizer with several chat templates writes them."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    for name in ("tokenizer.json", "additional_chat_templates/rag.jinja"):
        (source / name).write_text(name)
    target.mkdir()
    for _ in range(2):
        copy_files(source, target)
    assert (target / "additional_chat_templates" / "rag.jinja").read_text() == "additional_chat_templates/rag.jinja"
    assert sorted(path.name for path in target.iterdir()) == ["additional_chat_templates", "tokenizer.json"]
