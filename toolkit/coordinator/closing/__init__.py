"""Closes rounds: aggregates their updates, judges the new model, and takes back a bad one.

Start with `round_worker.py`; it uses the other modules.
"""
