"""Records of tables: Parquet, Arrow, JSON that pandas wrote, and datasets of `datasets`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from skipdecode.common.jsonl import BOM, Json, Row, decoded, row_of
from skipdecode.common.plain import check_columns, plain, without_nulls
from skipdecode.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from datasets import Dataset

_PARQUET, _ARROW, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
TABLES = (_PARQUET, _ARROW, _ARROW_STREAM)
"""How the files of tables begin."""
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")


def load_split(id: str, split: str | None = None, config: str | None = None, revision: str | None = None) -> Dataset:
    """A split of a dataset of a hub, or of a directory in its layout; see `datasets.load_dataset`.

    The directory of `Dataset.save_to_disk` has no splits, that of a `DatasetDict` a directory for each.
    Raises DataError: it does not load; MissingExtraError: `datasets` is not installed.
    """
    saved, alone = Path(id, split or "", "state.json").is_file(), Path(id, "state.json").is_file()
    if split is None and not saved:
        known = Path(id, "dataset_dict.json")
        splits = json.loads(known.read_bytes()).get("splits", []) if known.is_file() else ["train"]
        named = " or ".join(f"{id}:{name}" for name in splits)
        raise DataError(f"{id} is a directory: give a file, or name a split of the dataset in it ({named})")
    if split is not None and alone:
        raise DataError(f"the dataset saved in {id} has no splits: give {id}")
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(f"loading {id} from a hub (or give a file of records)", "hub") from None
    try:
        if saved:
            return datasets.load_from_disk(Path(id, split or ""))
        return datasets.load_dataset(id, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError) as e:
        reason = " ".join(str(e).split())[:200]
        raise DataError(f"the dataset {id} does not load ({reason}); give a file of records") from None


def import_pyarrow(name: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError(f"reading {name}", "hub") from None
    return pyarrow


def table_rows(file: IO[bytes], name: str) -> Iterator[Row]:
    """The rows of a Parquet or Arrow file, without the columns in which pandas keeps an index."""
    arrow, start = import_pyarrow(name), file.read(len(_ARROW))
    file.seek(0)
    try:
        if start.startswith(_PARQUET):
            opened = arrow.parquet.ParquetFile(file)
            columns, batches = opened.schema_arrow.names, opened.iter_batches(batch_size=1024)
        else:
            table = (arrow.ipc.open_file if start == _ARROW else arrow.ipc.open_stream)(file).read_all()
            columns, batches = table.column_names, table.to_batches(max_chunksize=1024)
        check_columns(name, columns)
        for batch in batches:
            for row in batch.to_pylist():
                yield {k: plain(without_nulls(value)) for k, value in row.items() if not _PANDAS_INDEX.fullmatch(k)}
    except (arrow.ArrowException, OSError) as e:
        raise DataError(f"{name} is no whole Parquet or Arrow file: {' '.join(str(e).split())[:120]}") from None


def array_rows(file: IO[bytes], name: str) -> Iterator[Row]:
    try:
        rows = json.loads(decoded(file.read().removeprefix(BOM)))
    except (DataError, RecursionError, ValueError) as e:
        raise DataError(f"{name} is no whole JSON array: {e}") from None
    yield from map(row_of, rows)


def pandas_rows(table: Json, name: str) -> list[Row] | None:
    """The records of a table by the `orient` with which pandas wrote it; None for another object."""
    data = table.get("data")
    if isinstance(data, list) and isinstance(columns := table.get("columns"), list):
        return [dict(zip(columns, row, strict=True)) for row in data]  # "split"
    if isinstance(schema := table.get("schema"), dict) and isinstance(data, list):
        index = schema.get("primaryKey", [])
        return [{field: value for field, value in row.items() if field not in index} for row in data]  # "table"
    inner = list(table.values())
    if not inner or not all(isinstance(item, dict) and item.keys() == inner[0].keys() for item in inner):
        return None
    counted, inner_counted = (all(map(str.isdecimal, keys)) for keys in (table, inner[0]))
    if inner_counted and not counted:
        return [{field: values[row] for field, values in table.items()} for row in inner[0]]  # "columns"
    if counted and not inner_counted:
        return inner  # "index"
    if len(inner) > 1:
        raise DataError(
            f"{name} is a table whose rows and columns cannot be told apart: write it with orient='records'"
        )
    return None
