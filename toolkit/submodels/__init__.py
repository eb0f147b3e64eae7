"""What a submodel is: spec, tensors, layers, places to cut, and how its size is counted.

Start with `submodel.py` and `spec.py`. Families build on this room; nothing here knows one of them.
"""
