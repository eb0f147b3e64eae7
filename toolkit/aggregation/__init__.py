"""Folding updates of any shape back into the one global model.

Start with `aggregate.py`; `federation.py` is the loop around it without any transport. Nothing here
knows how updates arrived.
"""
