"""Cutting a recorded model in two: where it can be cut, and the graphs on both sides.

Start with `cut_points.py`. `sample_flow.py` follows the samples through a graph, and `subgraph.py`
makes a part of it. Which cut a spec asks for, and how a slice is trained, is for `slicing/`.
"""
