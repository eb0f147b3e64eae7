"""Branches of a model on values or random draws: the graph computes all, and values choose one.

Start with `decisions.py`.
"""
