"""Describes devices and predicts the cost of training. All packages use its errors and units.

Start with `documents/device_profile.py` (a device) and `cost_model/prediction.py` (the cost of
training on the device). This package imports neither torch nor another package of the project.
"""
