"""Measuring a device: calibration, bundle profiles and their text output.

Start with `profiler.py` (what a bundle costs) and `calibration.py` (how fast the device is).
Measurements run in child processes: `measure_process.py` and `idle_memory_process.py`.
"""
