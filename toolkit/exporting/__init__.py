"""What `edgetailor export` does: load, split, export, and say what came out.

Start with `model_export.py`; `tiers.py` exports several submodels in one go.
"""
