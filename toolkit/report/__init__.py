"""Profiles as charts and tables, and two profiles compared: `edgetailor report`.

Start with `report_files.py`.
"""
