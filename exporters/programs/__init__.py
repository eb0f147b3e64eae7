"""From an `nn.Module` to training steps as flat graphs of forward operators.

Start with `capture.py` (recording a model), `training_signatures.py` (loss, gradient and optimizer
as one function) and `tracing.py` (that function as a graph). No file formats: the writers are in
`onnx/` and `tflite/`.
"""
