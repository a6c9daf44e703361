"""Honest evaluation: tasks, metrics with intervals, runs, comparisons and reports.

A run is one JSON document and one file of outputs; every table and picture is made from those.
"""
