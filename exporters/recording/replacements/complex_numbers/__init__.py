"""Replaces complex numbers by pairs of real numbers, which both formats have.

Start with `complex_pairs.py` (the pairs and their operators). `complex_elements.py` has the
functions of single numbers, `fourier.py` the transforms. `complex_context.py` records a model with
them.
"""
