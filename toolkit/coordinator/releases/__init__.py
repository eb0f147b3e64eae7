"""The releases of a federation: changes, offers to devices, and the release that each device runs.

Their files and the reports of devices are in `storage/`.
"""
