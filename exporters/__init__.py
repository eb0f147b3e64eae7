"""From programs to deployable bundles: training steps as ordinary graphs.

Start with `export.py`. Subpackages: `recording/` records a model, `programs/` makes training steps
of it, `decompositions/` and `recurrence/` give operators their forward form, `onnx/` and `tflite/`
write files, `memory/` predicts the memory of a run, and `verification/` compares the graphs with
PyTorch. Submodel families do not belong here: see `toolkit/`.
"""
