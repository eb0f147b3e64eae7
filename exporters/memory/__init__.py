"""Computes the memory that a graph needs, without running the graph.

Start with `onnx_footprint.py`. `liveness.py` computes when each tensor is alive (in memory), and
which outputs take no additional memory. `onnx_arena.py` replays the allocator of ONNX Runtime.
`tflite_footprint.py` predicts the memory in LiteRT. `profiles/cost_model/memory_rule.py` computes
the process peak from these results.
"""
