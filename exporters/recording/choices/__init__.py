"""Records branches on values or random draws: the graph computes all, and values select one.

Start with `decisions.py`.
"""
