"""`edgetailor report`: charts and tables of profiles and evaluations, and comparisons of profiles.

Start with `report_output.py`.
"""
