"""Functions of torch that a model calls, replaced while it is recorded.

`recorded_forms.py` and `index_forms.py` compute them with operators that both formats have,
`replaced_functions.py` those that decide by values. The other files are about one subject each:
sequences of different lengths, random numbers, statistics, Fourier transforms, gradients of the
model's own.
"""
