"""Aggregating updates of any shape into the one global model.

Start with `aggregate.py`. `recover.py` is for your own aggregation, `federation.py` is the loop
over rounds. Nothing here knows how updates arrive.
"""
