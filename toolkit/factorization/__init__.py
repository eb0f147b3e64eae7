"""Factorizing weights: truncated SVD and CP decomposition of tensors.

Start with `decompose_weights.py`. `factorizer.py` caches truncated factors on the server, and
`subspace_iteration.py` computes them faster than an SVD. This room knows tensors only; layers with
factors are in `factor_layers/`.
"""
