"""Secure aggregation, and differential privacy for the samples of a device.

With secure aggregation, the coordinator learns the sum of a group's updates, and no single update.
Start with `secret_sharer.py` (a device's side) and `secret_sum.py` (the coordinator's side). With
differential privacy, the update says little about a single sample: start with
`sample_gradients.py`. Nothing here uses a network, a file or a clock.
"""
