"""The memory that a runtime takes to open a graph that holds its weights.

While ONNX Runtime opens a file, the parsed file, its constants and their copies in the layout of
the kernels are in memory together. LiteRT maps the file, and keeps one copy of its constants.
"""

from dataclasses import replace

from exporters.memory.onnx_footprint import Footprint

FILES = {
    ("onnx", "float32"): 4.0,
    ("onnx", "float16"): 7.5,  # constants become float32
    ("onnx", "int8"): 3.4,
    ("litert", "float32"): 2.0,
    ("litert", "float16"): 3.4,
    ("litert", "int8"): 2.0,
}
"""How many times the size of the file, by runtime and precision. With these, the growth of the
process was 0.7 to 1.0 of the prediction for files of 0.3 to 45 MB on x86-64."""


def with_opening(run: Footprint, runtime: str, precision: str, file_bytes: int) -> Footprint:
    """Add the memory for opening a file of `file_bytes` to the footprint of a run.

    The footprint must not count constants.
    """
    opening = round(FILES[runtime, precision] * file_bytes)
    return replace(run, planned=run.planned + opening, process=run.process + opening)
