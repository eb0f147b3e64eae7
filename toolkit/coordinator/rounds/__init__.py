"""The rules of one round: its states, and the checks of an uploaded update.

Start with `round_state.py`. Nothing here uses HTTP.
"""
