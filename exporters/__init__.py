"""Exports programs as bundles for devices: training steps become ordinary graphs.

Start with `export.py`. `recording/` records a model, and `programs/` turns the recording into
training steps. `decompositions/` and `recurrence/` replace training-only operators by forward
operators. `onnx/` and `tflite/` write files. `memory/` predicts the memory of a run.
`verification/` compares the graphs with PyTorch. Submodel families are in `toolkit/`, not here.
"""
