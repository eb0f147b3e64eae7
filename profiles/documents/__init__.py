"""The JSON documents that describe devices and measurements: schema, reading, merging.

Start with `bundle_profile.py` (time and memory of a bundle on a machine) and `device_profile.py` (a
device). This package makes no predictions (see `cost_model/`) and takes no measurements (see
`device_agent/profiling/`).
"""
