"""Schedules in transformers models: families, gates, cache, attach."""

from skipdecode.models.release import warn_if_untested

warn_if_untested()
