"""Measures training with several bundles on one machine: `edgetailor-agent bench`."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from device_agent.formats.manifest import MANIFEST
from device_agent.profiling.calibration import device_profile
from device_agent.profiling.profile_text import table
from device_agent.profiling.profiler import profile_bundle
from device_agent.runtime.runtime_choice import all_versions
from profiles.documents.bundle_profile import Duration, Profile
from profiles.documents.calibration_record import Calibration
from profiles.documents.device_profile import DeviceProfile
from profiles.errors import EdgeTailorError, InputError
from profiles.text_formatting import UNKNOWN_CELL, megabytes

BENCH_VERSION = 2
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BenchRow:
    """The result for one bundle: its profile, or the error that ended the measurement."""

    name: str
    profile: Profile | None = None
    error: EdgeTailorError | None = None

    @property
    def step(self) -> Duration | None:
        """Time of all training work for one batch, without the recording of activations."""
        steps = self.profile.of_role("train") if self.profile else []
        return steps[0].steady if steps else None

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of the process that trains, in bytes, including Python and the runtime."""
        return self.profile.peak_bytes if self.profile else None


def bundles_in(places: Iterable[Path]) -> Iterator[Path]:
    """The bundles in `places` and directly inside the folders in `places`, sorted by name.

    Raises:
        InputError: A folder is not a bundle and has no bundles in it.
    """
    for folder in places:
        inside = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
        if not (folder / MANIFEST).exists() and not inside:
            raise InputError(
                "{folder} is not a bundle and has no bundles in it. Give a folder that `edgetailor "
                "export` wrote, or a folder of such folders.",
                code="bundle.none-found",
                folder=str(folder),
            )
        yield from [folder] if (folder / MANIFEST).exists() else inside


def measure_each(places: Iterable[Path], threads: int, runs: int) -> list[BenchRow]:
    """Profile every bundle that `bundles_in` finds in `places`.

    Args:
        places: Bundles, or folders of bundles.
        threads: Threads of the runtime; 0 means one for each core.
        runs: Measured runs of each phase.

    Returns:
        A row for each bundle. If a bundle cannot be measured, its row has the error.

    Raises:
        InputError: A folder has no bundle.
    """
    return [measure_bundle(bundle, threads, runs) for bundle in list(bundles_in(places))]


def measure_bundle(bundle: Path, threads: int, runs: int) -> BenchRow:
    """Profile one bundle, see `measure_each`."""
    logger.info("measuring %s", bundle.name)
    try:
        return BenchRow(bundle.name, profile_bundle(bundle, threads, runs=runs))
    except EdgeTailorError as error:
        return BenchRow(bundle.name, error=error)


def bench_profile(
    name: str | None, calibration: Calibration, available: int | None, rows: Sequence[BenchRow]
) -> DeviceProfile:
    """Create the document that `bench --out` writes.

    Args:
        name: Name of the device. If it is None, the name is that of the device's model or
            processor.
        calibration: The device's calibration.
        available: Memory in bytes that is available to an agent, measured before all other
            measurements.
        rows: The results of `measure_each`. There may be none.

    Returns:
        The profile of this device, with all versions and the profiles in `rows`.
    """
    device = device_profile("", calibration, Path.cwd(), available)
    about = device.machine
    own = about and (about.model or about.processor or about.architecture)
    return replace(
        device,
        name=name or own or "unknown",
        versions=all_versions(),
        trainings=tuple(row.profile for row in rows if row.profile is not None),
    )


def bench_table(rows: Sequence[BenchRow]) -> list[str]:
    """Format `rows` as a table with a legend, in lines of text."""

    def cells(row: BenchRow) -> tuple[str, ...]:
        step, profile = row.step, row.profile
        return (
            row.name,
            profile.submodel if profile else UNKNOWN_CELL,
            str(profile.batch_size) if profile else UNKNOWN_CELL,
            profile.machine.runtime.partition(" ")[0] if profile else UNKNOWN_CELL,
            UNKNOWN_CELL if step is None else f"{step.median_s:.4f}",
            UNKNOWN_CELL if step is None else f"{step.spread:.0%}",
            megabytes(row.peak_bytes),
        )

    header = ("bundle", "submodel", "batch", "runtime", "s/batch", "spread", "peak MB")
    return [
        *table([header, *map(cells, rows)]),
        *legend([row.profile for row in rows if row.profile]),
        *(f"{row.name}: {row.error}" for row in rows if row.error),
    ]


def legend(profiles: Sequence[Profile]) -> list[str]:
    """Explain the columns of the table, and where and how their figures were measured."""
    if not profiles:
        return []
    about, method = profiles[0].machine, profiles[0].method
    runtimes = dict.fromkeys(profile.machine.runtime for profile in profiles)
    recording = any(profile.of_role("stage") for profile in profiles)
    return [
        f"s/batch: median of {method.runs} training steps; spread: p10 to p90, in % of the median",
        *(
            [
                "a slice's time does not include the recording of activations, which happens once "
                "in a training"
            ]
            * recording
        ),
        "peak MB: the whole process that trains, with Python and the runtime",
        f"{', '.join(runtimes)}; threads {method.threads or 'all'}",
        f"on {about.model or about.processor or about.architecture}",
    ]


def as_document(rows: Sequence[BenchRow]) -> dict[str, object]:
    """Create the document that `bench --json` prints."""
    return {
        "version": BENCH_VERSION,
        "bundles": [
            {
                "name": row.name,
                "submodel": row.profile and row.profile.submodel,
                "batch_size": row.profile and row.profile.batch_size,
                "runtime": row.profile and row.profile.machine.runtime,
                "seconds_per_batch": row.step and row.step.median_s,
                "peak_bytes": row.peak_bytes,
                "error": row.error and str(row.error),
                "code": row.error and row.error.code,
            }
            for row in rows
        ],
    }
