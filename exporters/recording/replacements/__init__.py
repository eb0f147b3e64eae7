"""Functions of torch that a model calls, replaced while it is recorded.

`recorded_forms.py` and `index_forms.py` compute functions with operators that both formats have.
`replaced_functions.py` replaces functions that branch on the values of tensors. Each of the other
files has one subject: sequences of different lengths, random numbers, statistics, Fourier
transforms, and gradients that the model defines itself.
"""
