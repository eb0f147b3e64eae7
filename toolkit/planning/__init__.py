"""Planning: list a model's submodels, predict their costs, and choose one for a device.

Start with `plan.py`. The rules of the prediction are in `profiles/cost_model/`.
"""
