"""Local data: read from files or from the owner's function, prepared and checked.

Start with `local_data.py`. It reads `array_files.py` (x and y as the model takes them),
`data_functions.py`, or pictures and CSV files, of which `preparation.py` makes samples.
`data_checks.py` compares all of them with the model. Nothing in here knows how a bundle is trained.
"""
