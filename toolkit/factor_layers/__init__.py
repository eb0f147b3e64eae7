"""Layers that compute with factors instead of dense weights.

`low_rank_layers.py` is for the family `low-rank` (U V^T), `cp_layers.py` for `cp` (CP factors). The
factors themselves are computed in `factorization/`.
"""
