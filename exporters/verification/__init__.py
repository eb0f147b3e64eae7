"""Verifies exported graphs: PyTorch's autograd, the traced graph and the runtime must agree."""
