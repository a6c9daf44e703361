"""What Python users hand over, in Python's own types: numbers of numpy and torch, tables of pandas, and their like."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from skipdecode.errors import DataError, OptionError


def unwrapped(value: Any) -> Any:
    """A value, array or tensor of numpy, torch, pandas or Arrow in Python's own types; other values as they are."""
    if hasattr(value, "as_py"):  # one value of Arrow
        return value.as_py()
    return value.tolist() if hasattr(value, "tolist") else value


def plain(value: Any) -> Any:
    """A value of a record in the types of JSON: dates and exact numbers are text, a missing value is null.

    Bytes are the text that they are in UTF-8, as old Parquet files have it; others, as of pictures, are null.
    """
    value = unwrapped(value)
    if isinstance(value, bytes | bytearray):
        with suppress(UnicodeDecodeError):
            return value.decode()
        return None
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [*map(plain, value)]
    is_nan = isinstance(value, float) and math.isnan(value)
    if is_nan or type(value).__name__ in ("NAType", "NaTType"):  # of pandas
        return None
    return str(value) if isinstance(value, date | time | timedelta | Decimal | UUID) else value


def without_nulls(value: Any, but: Collection[str] = ()) -> Any:
    """A value without the null fields of its objects, `but` fields of these names.

    A table gives each object the fields of all others.
    """
    if isinstance(value, dict):
        fields = {name: inner for name, inner in value.items() if inner is not None or name in but}
        return {name: without_nulls(inner, but) for name, inner in fields.items()}
    return [without_nulls(item, but) for item in value] if isinstance(value, list) else value


def listed(data: object, name: str = "records") -> list[Any]:
    """The items of a list, an array, a generator or a table, in Python's own types; rows of a table as dictionaries.

    Tables are DataFrames of pandas and polars, Arrow's tables and datasets of `datasets`. A text or a mapping is one
    item. Raises DataError: a dataset has splits, or a table a column twice; OptionError: there is nothing to iterate.
    """
    table: Any = data
    if isinstance(data, Mapping):
        if data and all(hasattr(split, "with_format") for split in data.values()):
            raise DataError(f"{name}: the dataset has splits, give one of them: {', '.join(map(str, data))}")
        table = [data]
    elif isinstance(data, str) or getattr(data, "ndim", None) == 0:
        table = [data]
    elif hasattr(table, "with_format"):  # datasets
        table = _with_plain_rows(table)
    elif hasattr(table, "to_pylist") or hasattr(table, "read_all"):  # Arrow, and its readers
        table = table.read_all() if hasattr(table, "read_all") else table
        check_columns(name, table.schema.names if hasattr(table, "schema") else ())
        table = table.to_pylist()
    elif hasattr(table, "to_dicts") or hasattr(table, "collect_schema"):  # polars, whose lazy frame has no rows yet
        table = table.lazy().collect().to_dicts()
    elif hasattr(table, "iterrows"):  # pandas
        check_columns(name, table.columns)
        table = table.to_dict("records")
    is_iterable = isinstance(table, Iterable) or hasattr(table, "__getitem__")  # the latter of torch's datasets
    if isinstance(table, bytes | bytearray) or not is_iterable:
        raise OptionError(name, data, "a list of them, or a table such as a DataFrame")
    rows = [*map(plain, table)]
    return rows if table is data or isinstance(data, Mapping) else [*map(_without_inner_nulls, rows)]


def _with_plain_rows(dataset: Any) -> Any:
    """A dataset whose rows are not those of another library; it keeps a transform, and the columns that were chosen."""
    form = getattr(dataset, "format", None)
    if form is None:  # an iterable one does not say it
        return dataset.with_format(None)
    return dataset if form["type"] == "custom" else dataset.with_format(None, columns=form["columns"])


def check_columns(name: str, columns: Collection[object]) -> None:
    """Raise DataError if a table has a column twice: a record would have one of the two."""
    if len({*columns}) < len(columns):
        raise DataError(f"{name}: a column is there twice: {', '.join(map(str, columns))}")


def _without_inner_nulls(row: object) -> object:
    """A row of a table whose objects have no null fields; its own fields may be null."""
    return {name: without_nulls(value) for name, value in row.items()} if isinstance(row, dict) else row


def as_records(source: Any) -> Any:
    """A name of records, or None, as it is; other sources as a list of mappings: see `listed`."""
    return source if source is None or isinstance(source, str | Path) else listed(source)
