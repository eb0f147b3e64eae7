"""Tracks channels through a recorded graph, and builds the network with fewer channels.

Start with `narrowing.py`. `channel_choice.py` says which channels stay. `channel_tracking.py`
visits the operators of a graph. For each operator a rule in one of the `*_rules.py` modules states
which axes of its inputs and outputs have the same channels. `channel_units.py` keeps this
knowledge, and `operator_call.py` describes one operator call for its rule.
"""
