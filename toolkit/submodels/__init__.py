"""Submodels: their specs, tensors and layers, and how their sizes are counted.

Start with `submodel.py`, `spec.py` and `family.py`, the contract of every family. The families
build on this room; nothing here depends on a particular one.
"""
