"""What a device is and what it can do, and what every package shares: errors, units, text.

Start with `documents/device_profile.py` (a device) and `cost_model/prediction.py` (what training
costs there). Nothing here imports another package of the project, or torch.
"""
