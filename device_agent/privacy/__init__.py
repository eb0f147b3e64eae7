"""Secure aggregation, and differential privacy for the samples of a device.

With secure aggregation, the coordinator learns only the sum of a group's updates, not a single
update. Start with `secret_sharer.py` (a device's side) and `secret_sum.py` (the coordinator's
side). With differential privacy, an update reveals little about a single sample: start with
`sample_gradients.py`. This package uses no network, files or clock.
"""
