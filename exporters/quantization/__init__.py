"""Stores the weights of inference graphs as float16 or int8, by each runtime's own quantizer.

`precision.py` chooses the quantizer. Graphs of training bundles are not changed here.
"""
