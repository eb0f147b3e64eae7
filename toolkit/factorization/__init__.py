"""Factorizes weights: truncated SVD and CP decomposition of tensors.

`truncated_svd.py` and `cp_decomposition.py` are the two methods. `factorizer.py` caches truncated
factors on the server, and `subspace_iteration.py` computes them faster than an SVD. This package
handles only tensors; layers with factors are in `factor_layers/`.
"""
