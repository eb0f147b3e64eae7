"""Reads local data from files or from the owner's function. Prepares and checks the data.

Start with `local_data.py`. Data come from one of three modules. `array_files.py` reads samples and
labels that need no conversion, `data_functions.py` calls the owner's function, and `preparation.py`
converts pictures and CSV files to samples. `data_checks.py` compares all data with the model. This
package does not train bundles.
"""
