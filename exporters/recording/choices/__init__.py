"""Branches of a model's code on values or random draws: a recording has all, and values choose one.

Start with `decisions.py`.
"""
