"""What the operating system reports and allows: process memory, disk space, sensors.

Start with `process_memory.py`. A figure that the system does not report is None, never 0.
"""
