"""The memory that a graph needs, computed from the graph alone.

Start with `onnx_footprint.py`. `liveness.py` finds which tensors are alive when, `arena.py` replays
ONNX Runtime's allocator.
"""
