"""Plans: lists the submodels of a model, predicts their costs, and chooses one for a device.

Start with `plan.py`. The rules of the prediction are in `profiles/cost_model/`.
"""
