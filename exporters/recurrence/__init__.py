"""LSTM, GRU and plain recurrent layers as loops over time.

Start with `recurrent_layers.py`. The layers use one loop operator (`loop_operator.py`). Writers in
`onnx/` and `tflite/` translate this operator into the loops of their runtime.
"""
