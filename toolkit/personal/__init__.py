"""Bi-level training: a personal model that stays on the device beside the uploaded one.

Start with `bilevel_training.py`; `cp` and `pfedme` are made of it.
"""
