"""The releases of a federation: their changes, and what devices are offered and run.

Their files and the reports of devices are in `storage/`.
"""
