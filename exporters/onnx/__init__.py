"""Writing traced steps as ONNX graphs.

Start with `onnx_writer.py`. Passes that only ONNX needs are here; what every runtime needs is a
decomposition.
"""
