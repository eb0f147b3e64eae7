"""Answers the requests of devices to join and leave, and to send updates, troubles and reports.

These modules know no HTTP. `coordinator.py` calls them.
"""
