"""Records an `nn.Module` as ATen graphs that families can cut, count and differentiate.

Start with `capture.py`. `model_checks.py` refuses models that cannot be trained, `graph_checks.py`
refuses graphs that cannot be exported, and `recording_comparison.py` refuses a recording whose
results differ from the model's. `functional_form.py`, `graph_cleanup.py` and `graph_constants.py`
bring the recorded graph into one form. `choices/` and `sizes/` are for code that decides by values,
or depends on sizes. `replacements/` has the functions of torch that get another form while a model
is recorded. Training steps do not belong here: see `programs/`.
"""
