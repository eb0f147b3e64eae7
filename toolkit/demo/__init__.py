"""`edgetailor demo`: a whole federation on this machine, with real processes and real data.

Start with `run_demo.py`.
"""
