"""Aggregation rules against hostile devices, which replace the weighted mean."""
