"""Records code that branches on values or random draws: a graph computes all branches.

Start with `decisions.py`.
"""
