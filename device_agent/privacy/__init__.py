"""Secure aggregation: the coordinator learns the sum of a group's updates, and no single update.

Start with `secret_sharer.py` (a device's side) and `secret_sum.py` (the coordinator's side).
Nothing here uses a network, a file or a clock.
"""
