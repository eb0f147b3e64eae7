"""The requests of devices: they join and leave, send updates, troubles and reports.

These modules know no HTTP. `coordinator.py` calls them.
"""
