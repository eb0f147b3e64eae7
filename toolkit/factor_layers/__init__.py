"""Layers that compute with factors instead of dense weights.

`low_rank_layers.py` is for the family `low-rank` (U V^T), and `cp_layers.py` is for the family `cp`
(CP factors). The factors themselves are computed in `factorization/`.
"""
