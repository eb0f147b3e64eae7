"""Verifies exported graphs: the results of autograd, traced graph and runtime must agree."""
