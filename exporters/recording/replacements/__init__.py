"""Replaces functions of torch while a model that calls them is recorded.

`function_forms/` has the functions that are computed with other operators, and `masks/` has
selections by masks. `python_code/` is for Python's own functions, and `complex_numbers/` for
complex numbers and Fourier transforms. `replaced_functions.py` replaces functions that branch on
the values of tensors. Each of the other files has one subject, such as random numbers, sequences of
different lengths, and gradients that the model defines itself.
"""
