"""Submodels: their specs, tensors and layers, and the counting of their sizes.

Start with `submodel.py`, `spec.py` and `family.py`, the contract of every family. The families use
this folder; nothing here depends on a particular family.
"""
