"""Names and numbers of a prompt that its response repeats."""

from __future__ import annotations

import re
from collections.abc import Sequence

from skipdecode.data.records import Record

_WORD = r"[A-ZÀ-ÖØ-Þ][\w'’-]+"
_VALUE = re.compile(rf"(?<!\w)(?:{_WORD}(?: {_WORD})*|\d[\d.,]*\d)(?!\w)")


def repeated(record: Record, fields: Sequence[str]) -> list[str]:
    """Names and numbers in these fields of a record that half of its references have too; a number has two digits."""
    found: dict[str, None] = {}
    for field in fields:
        text = record.values.get(field, "")
        small = set(re.findall(r"\w+", text))
        # A word that is written small elsewhere in the text began a sentence.
        found |= dict.fromkeys(value for value in _VALUE.findall(text) if value.lower() not in small - {value})
    texts = record.references
    return [value for value in found if 2 * sum(value in text for text in texts) >= max(1, len(texts))]
