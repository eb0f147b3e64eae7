"""Branches of a model's code on values or random draws.

A recording has all branches; values choose.

Start with `decisions.py`.
"""
