"""Computes activations again for the backward pass, which saves memory in the forward pass."""
