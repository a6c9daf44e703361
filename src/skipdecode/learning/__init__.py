"""Choosing layers, fits and tuning under a schedule: `calibrate`, `tune` and `prepare`."""
