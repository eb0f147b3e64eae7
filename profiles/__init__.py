"""Devices and what training costs on them; and what all packages share: errors, units, text.

Start with `documents/device_profile.py` (a device) and `cost_model/prediction.py` (the cost of
training on it). Nothing here imports another package of the project, or torch.
"""
