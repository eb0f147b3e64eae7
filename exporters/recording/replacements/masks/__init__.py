"""Elements that a mask selects, such as `x[mask]`: the graph computes with all elements instead.

Start with `boolean_masks.py`. `masked_index.py` finds the mask in an index. `masks_by_size.py`
counts the selected elements of masks that only the size of the batch decides.
"""
