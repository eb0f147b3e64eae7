"""Functions of torch that are recorded as other operators, which both formats have.

Start with `recorded_forms.py`, which lists all of them. Each other file has the functions of one
subject.
"""
