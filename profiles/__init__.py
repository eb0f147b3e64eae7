"""Describes devices and predicts the cost of training. All packages use its errors and formats.

Start with `documents/device_profile.py` (a device) and `cost_model/prediction.py` (the cost of
training on it). Nothing here imports another package of the project, or torch.
"""
