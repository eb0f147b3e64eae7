"""Measures a device by bundle profiles and a calibration. Also formats the results as text.

- `profiler.py`: time and memory of a bundle. It runs `measure_process.py` in child processes.
- `bundle_benchmark.py`: several bundles in one table, for `edgetailor-agent bench`.
- `calibration.py`: speed and memory overhead of the device, without a bundle. It runs the child
  processes `calibrate_speed_process.py` (with `operation_timing.py` and `calibration_cases.py`) and
  `calibrate_memory_process.py`.
- `profile_text.py`, `calibration_summary.py`: the results as text.
"""
