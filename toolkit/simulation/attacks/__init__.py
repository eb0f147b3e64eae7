"""Attacks by hostile clients of a simulation. `attack_table.py` lists them.

Each attack is a function. It changes the samples before a training, or the update after the
training.
"""
