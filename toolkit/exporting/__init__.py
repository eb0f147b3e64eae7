"""Does what `edgetailor export` needs: loads and splits a model, exports bundles, reports sizes.

Start with `model_export.py`. `tiers.py` exports several submodels of one model.
"""
