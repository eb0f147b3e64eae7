"""The steps of `edgetailor export`: load and split a model, export bundles, report sizes.

Start with `model_export.py`. `tiers.py` exports several submodels of one model.
"""
