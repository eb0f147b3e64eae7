"""The memory that a runtime needs to open a graph that contains its weights.

When ONNX Runtime opens a file, the parsed file, its constants, and copies of the constants in the
layout of the kernels are in memory at the same time. LiteRT maps the file and has one copy of its
constants.
"""

from dataclasses import replace

from exporters.memory.onnx_footprint import Footprint

FILES = {
    ("onnx", "float32"): 4.0,
    ("onnx", "float16"): 7.5,  # constants become float32
    ("onnx", "int8"): 3.9,
    ("litert", "float32"): 2.0,
    ("litert", "float16"): 3.0,
    ("litert", "int8"): 2.0,
}
"""The memory for opening a file as a multiple of its size, by runtime and precision. For files of
0.3 to 75 MB on x86-64, processes grew by 0.5 to 1.0 times this prediction."""
UNPACKED = 2.0
"""The memory in which LiteRT unpacks a float16 constant, as a multiple of its size. LiteRT unpacks
one constant at a time."""


def with_opening(
    run: Footprint, runtime: str, precision: str, file_bytes: int, largest_constant: int = 0
) -> Footprint:
    """Add the memory for opening a file of `file_bytes` to the footprint of a run.

    The footprint must not include constants. `largest_constant` is the size of the largest constant
    in the file, in bytes. Only LiteRT with float16 needs this argument.
    """
    opening = round(FILES[runtime, precision] * file_bytes + UNPACKED * largest_constant)
    return replace(run, planned=run.planned + opening, process=run.process + opening)
