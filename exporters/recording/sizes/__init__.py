"""Records models that divide batches, cut sequences or limit the number of samples."""
