"""Evaluation: methods, metrics with intervals, runs, comparisons.

A run is one JSON document and one file of outputs; every table and picture is made from these two.
"""
