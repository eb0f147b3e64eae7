"""Planning: which submodels a model has, what each costs, and which one a device gets.

Start with `plan.py`. The cost rules themselves are in `profiles/cost_model/`.
"""
