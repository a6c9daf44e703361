"""Schedules: which layers run at which generation position, and the ways to make one. Pure Python, no torch."""

from __future__ import annotations

from skipdecode.schedule.order import PromptDepth
from skipdecode.schedule.schedule import Schedule

__all__ = ["PromptDepth", "Schedule"]
