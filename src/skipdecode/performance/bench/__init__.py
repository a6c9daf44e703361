"""Measurements of the machine and of decoding on it."""
