"""Stores the weights of inference graphs as float16 or int8, with the quantizer of each runtime.

`precision.py` chooses the quantizer. Graphs of training bundles are not changed here.
"""
