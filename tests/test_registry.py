"""Names that are imported on first use."""

from __future__ import annotations

import sys

import pytest

from skipdecode.common.registry import Registry
from skipdecode.errors import UsageError


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
