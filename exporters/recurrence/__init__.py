"""LSTM, GRU and plain recurrent layers as loops over time.

Start with `recurrent_layers.py`. Writers translate the one loop operator (`loop_operator.py`) into
the loops of their runtime; that code belongs to `onnx/` and `tflite/`, not here.
"""
