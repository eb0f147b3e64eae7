"""Who takes part: checks of a join request, the submodel that a device gets, its activity.

Start with `join_validation.py`.
"""
