"""How a model is recorded that divides batches, cuts sequences or fixes the number of samples."""
