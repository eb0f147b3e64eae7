"""Planning: what submodels a model has, what each takes, and which one a device gets."""
