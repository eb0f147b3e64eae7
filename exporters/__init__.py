"""Exports programs as bundles for devices: training steps become ordinary graphs.

Start with `export.py`. `recording/` records a model, and `programs/` turns it into training steps.
`decompositions/` and `recurrence/` replace operators by forward operators. `onnx/` and `tflite/`
write files. `memory/` predicts the memory of a run. `verification/` compares the graphs with
PyTorch. Submodel families do not belong here: see `toolkit/`.
"""
