"""Replaces Python's own functions in a model's code, such as `len`, `range` and `random.random`."""
