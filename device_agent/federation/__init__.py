"""A device's part in a federation: joining, keys, stored state, rounds, the owner's limits.

Start with `round_loop.py` (the rounds) and `membership.py` (joining and leaving).
"""
