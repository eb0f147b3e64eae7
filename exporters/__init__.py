"""From programs to deployable bundles: training steps as ordinary graphs.

Start with `export.py`. Rooms: `recording/` records a model, `programs/` makes training steps of it,
`decompositions/` and `recurrence/` give operators their forward form, `onnx/` and `tflite/` write
files, `memory/` predicts what they need, and `verification/` compares them with PyTorch. Submodel
families are unknown here: they live in `toolkit/`.
"""
