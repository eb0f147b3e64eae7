"""A device in a federation: joining and leaving, its key and state, rounds, the owner's limits.

Start with `round_loop.py` (the rounds) and `membership.py` (joining and leaving).
"""
