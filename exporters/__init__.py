"""From programs to deployable bundles: training steps as ordinary graphs.

Start with `export.py`. Rooms: `programs/` makes graphs, `decompositions/` and `recurrence/` give
operators their forward form, `onnx/` and `tflite/` write files, `memory/` predicts what they need.
Submodel families are unknown here: they live in `toolkit/`.
"""
