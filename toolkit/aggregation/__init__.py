"""Aggregates updates of any shape into one global model.

Start with `aggregate.py`. `recover.py` is for your own aggregation, and `federation.py` is the loop
over rounds. Nothing here depends on how updates arrive.
"""
