"""The mathematics of `slice`: where a model is cut, and what is trained after the cut.

Read `cut_choice.py` (which cut point), `cut_model.py` (the graphs on both sides), `time_cuts.py`
(cuts within an LSTM), `inner_family.py` (factors after the cut) and `slice_program.py` (the
program for the exporters) in this order. `submodels/cut_points.py` finds the cut points, with the
files that it imports: what depends on the samples (`sample_flow.py`), which operators of the two
graphs match (`matching_operators.py`), and a part of a graph (`subgraph.py`). The family `slice`
itself, with its spec, is in `families/slice.py`.
"""
