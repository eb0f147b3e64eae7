"""Writes traced steps as ONNX graphs.

Start with `onnx_writer.py`. Passes that only ONNX needs are here. If all runtimes need another form
of an operator, write a decomposition instead; see `exporters/decompositions`.
"""
