"""Passes that shorten a traced step before it becomes an ONNX graph."""
