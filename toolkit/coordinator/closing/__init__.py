"""Opens and closes rounds: selects devices, aggregates updates, and judges the new model.

Start with `round_worker.py`; it uses the other modules.
"""
