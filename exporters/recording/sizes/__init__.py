"""Records models that divide batches, cut sequences or fix the number of samples."""
