"""The mathematics of `slice`: where a model is cut, and what is trained after the cut.

Read `cut_choice.py` (which cut point), `cut_model.py` (the graphs on both sides), `time_cuts.py`
(cuts within an LSTM), `inner_family.py` (factors after the cut) and `slice_program.py` (the
program for the exporters) in this order. `cutting/` finds the cut points and builds the graphs of
both sides. The family `slice` itself, with its spec, is in `families/slice.py`.
"""
