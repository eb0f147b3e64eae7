"""`edgetailor report`: draws profiles and evaluations as charts and tables, compares two profiles.

Start with `report_output.py`.
"""
