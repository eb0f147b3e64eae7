"""Turns a recorded model into training steps: flat graphs of forward operators.

Start with `training/`, which combines loss, gradient and optimizer in one function, and
`tracing.py`, which turns this function into a graph. Models are recorded in `recording/`. File
formats do not belong here; the writers are in `onnx/` and `tflite/`.
"""
