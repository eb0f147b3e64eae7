"""Replaces functions of torch while a model that calls them is recorded.

`recorded_forms.py` lists the functions that are computed with operators that both formats have.
`replaced_functions.py` replaces functions that branch on the values of tensors. Each of the other
files has one subject: sequences of different lengths, random numbers, statistics, cumulative
products, and gradients that the model defines itself. Complex numbers and Fourier transforms have a
folder, `complex_numbers`.
"""
