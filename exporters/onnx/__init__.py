"""Writes traced steps as ONNX graphs.

Start with `onnx_writer.py`. This package has the passes that only ONNX needs. If all runtimes need
another form of an operator, write a decomposition in `exporters/decompositions` instead.
"""
