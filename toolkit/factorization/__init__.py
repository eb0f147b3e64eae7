"""Factorizing weights: truncated SVD and CP decomposition of plain tensors.

Start with `decompose_weights.py`. Tensors only: no models and no layers.
"""
