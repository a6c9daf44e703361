"""Tuning under a schedule: data, aligned batches, objective, curricula, the run, and what it saves."""
