"""The inputs of a model: several inputs in one sample, and the range of their numbers."""
