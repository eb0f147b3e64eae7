"""Records an `nn.Module` as ATen graphs that families can cut, count and differentiate.

Start with `capture.py`. `model_checks.py` refuses models that cannot be trained. `graph_checks.py`
refuses graphs that cannot be exported. `recording_comparison.py` refuses a recording if its results
differ from the model's results. `functional_form.py`, `graph_cleanup.py` and `graph_constants.py`
bring the recorded graph into one form. `choices/` is for code that decides by values, and `sizes/`
for code that depends on sizes. `replacements/` replaces functions of torch while a model is
recorded. Training steps are in `programs/`, not here.
"""
