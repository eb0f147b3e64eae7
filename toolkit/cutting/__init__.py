"""Cuts a recorded model in two: finds the possible cuts, and builds the graphs on both sides.

Start with `cut_points.py`. `sample_flow.py` follows the samples through a graph, and `subgraph.py`
builds a part of it. `slicing/` chooses the cut for a spec and trains the slice.
"""
