"""`edgetailor demo`: the main job on this machine, with real processes and real data.

Start with `run_demo.py`.
"""
