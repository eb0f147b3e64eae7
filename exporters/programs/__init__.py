"""Turns an `nn.Module` into training steps: flat graphs of forward operators.

Start with `capture.py` (records a model), `training_signatures.py` (combines loss, gradient and
optimizer in one function) and `tracing.py` (turns that function into a graph). File formats do not
belong here; the writers are in `onnx/` and `tflite/`.
"""
