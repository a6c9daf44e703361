"""Schedules: which layers run at which generation position, and the ways to make one. Pure Python, no torch."""

from __future__ import annotations

from skipdecode.schedule.schedule import PromptDepth, Schedule

__all__ = ["PromptDepth", "Schedule"]
