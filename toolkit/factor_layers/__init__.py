"""Layers that compute with factors in place of dense weights.

`low_rank_layers.py` has U V^T for the family `low-rank`, `cp_layers.py` CP factors for `cp`.
"""
