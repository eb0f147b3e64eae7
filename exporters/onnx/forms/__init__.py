"""Other forms of an ONNX graph with the same results: blocked layouts and Winograd's products."""
