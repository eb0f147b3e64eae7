"""Reads local data from files or from the owner's function, prepares it and checks it.

Start with `local_data.py`. It uses `array_files.py` (x and y as the model takes them),
`data_functions.py`, or `preparation.py`, which converts pictures and CSV files to samples.
`data_checks.py` compares all data with the model. This package does not train bundles.
"""
