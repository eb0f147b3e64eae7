"""Answers the requests of devices to join and leave, and to send updates, troubles and reports.

These modules do not use HTTP. `coordinator.py` calls them.
"""
