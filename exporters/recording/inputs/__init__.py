"""What a model takes: several inputs in one sample, and the range of its numbers."""
