"""Computes activations again for the backward pass, so that they take no memory before it."""
