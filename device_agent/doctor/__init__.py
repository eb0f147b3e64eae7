"""`edgetailor-agent doctor`: checks of this machine and of the connection to the coordinator.

Start with `doctor.py`. Every check returns a `Finding` with a remedy.
"""
