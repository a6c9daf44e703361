"""Calibration: the drop order and the prompt set learned on the user's records, the depth solved for a target."""
