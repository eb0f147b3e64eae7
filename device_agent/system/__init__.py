"""Access to the operating system: process memory, disk space, sensors, clock.

Start with `process_memory.py`. A figure that the system does not report is None, never 0.
"""
