"""The page of built-in devices: what is published about each, and what an owner has measured."""

from device_agent.profiling.calibration_summary import rates
from profiles.documents.device_profile import MEASURED, DeviceProfile, built_in, load_device
from profiles.text_formatting import format_bytes

HEAD = """\
# Built-in devices

These devices can be named in `edgetailor plan --profile NAME`. Processor, cores and memory are
published figures. The other columns are empty until an owner has
[sent in](../guides/profiling.md#send-in-the-figures-of-a-board) a measurement: an emulated board or
another machine would give other figures. Rates are those of the slowest and the fastest of the
measured sizes.

"""
COLUMNS = (
    *("name", "device", "processor", "cores", "memory"),
    *("measured", "runtime", "convolutions", "matrix products", "agent, idle"),
)
END = """
This page is generated from `profiles/devices`: `python docs/generate.py`.
"""
EMPTY = ["", "", "", "", ""]


def page() -> str:
    """`devices.md`. Raises ValueError if a measurement is of another device than its name says."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(row(load_device(name)) for name in built_in())]
    return HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in rows) + END


def row(device: DeviceProfile) -> list[str]:
    """The cells of `device`, of which the last are empty without a measurement."""
    memory = "" if device.memory_bytes is None else format_bytes(device.memory_bytes)
    cores = "" if device.cores is None else str(device.cores)
    published = [f"`{device.name}`", device.title or "", device.processor or "", cores, memory]
    return published + measured(device)


def measured(device: DeviceProfile) -> list[str]:
    """The cells of a measurement."""
    calibration, machine = device.calibration, device.machine
    if calibration is None:
        return EMPTY
    found = None if machine is None else (machine.cpu_count, machine.memory_bytes)
    if found is None or found[0] != device.cores or not same_memory(found[1], device.memory_bytes):
        raise ValueError(
            f"profiles/devices/{device.name}.json is of a machine with (cores, bytes of memory) = "
            f"{found}, but {device.name}.toml says {(device.cores, device.memory_bytes)}. Put the "
            "file beside the profile of its board."
        )
    kinds = ("convolution", "product")
    timings = [[t for t in calibration.timings if t.kind == kind] for kind in kinds]
    overhead = calibration.memory
    return [
        f"[{device.date}]({device.sources[MEASURED]})",
        calibration.runtime,
        *(rates(kind, found) for kind, found in zip(kinds, timings, strict=True)),
        "" if overhead is None else format_bytes(overhead.idle_bytes),
    ]


def same_memory(found: int | None, published: int | None) -> bool:
    """Whether a system that reports `found` may have `published`: it keeps a part for itself."""
    return found is None or published is None or 0.7 * published <= found <= published
