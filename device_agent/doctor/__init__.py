"""`edgetailor-agent doctor`: checks of this machine and of the way to the coordinator.

Start with `doctor.py`. Every check returns a `Finding` with a remedy.
"""
