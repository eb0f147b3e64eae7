"""The work of `edgetailor export`: load a model, split it, export bundles, report their sizes.

Start with `model_export.py`. `tiers.py` exports several submodels of one model.
"""
