"""Local data: read from files or from the owner's function, prepared and checked.

Start with `local_data.py`. It reads `array_files.py` (x and y as the model takes them),
`data_functions.py`, or files that the bundle says how to prepare: `picture_files.py` and
`series_files.py`. `data_checks.py` compares all of them with the model. Nothing in here knows how
a bundle is trained.
"""
