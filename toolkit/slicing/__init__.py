"""The mathematics of `slice`: where and how a model is cut for recorded activations.

Start with `time_cuts.py` for recurrent models; cuts between layers are in
`submodels/cut_points.py`.
"""
