"""Records an `nn.Module` as ATen graphs that families can cut, count and differentiate.

Start with `capture.py`. `model_checks.py` refuses what cannot be trained,
`recording_comparison.py` a recording that computes something else; `functional_form.py` and
`graph_cleanup.py` bring the recorded graph into one form. What is trained, and how, does not belong
here: see `programs/`.
"""
