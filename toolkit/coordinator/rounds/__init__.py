"""The rules of one round: its states, and what an uploaded update has to be.

Start with `round_state.py`. No HTTP and no storage.
"""
