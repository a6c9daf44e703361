"""Schedules in transformers models: families, gates, cache, attach."""
