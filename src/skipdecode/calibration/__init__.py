"""Calibration: drop order and budget curve learned on the user's records, with losses predicted and then checked."""
