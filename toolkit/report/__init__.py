"""Draw profiles and evaluations as charts and tables, or compare two profiles: `edgetailor report`.

Start with `report_output.py`.
"""
