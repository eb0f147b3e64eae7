"""Bi-level training: a personal model that stays on the device, and a local model to upload.

Start with `bilevel_training.py`; the families `cp` and `pfedme` use it.
"""
