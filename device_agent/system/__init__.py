"""What the operating system reports and allows: process memory, disk space, sensors.

Start with `process_memory.py`. Figures that the system does not give are None, never 0.
"""
