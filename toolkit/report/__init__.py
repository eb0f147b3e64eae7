"""Profiles drawn, tabulated and compared: `edgetailor report`."""
