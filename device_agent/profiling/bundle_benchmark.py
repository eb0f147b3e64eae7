"""Training with several bundles on one machine, as one table: `edgetailor-agent bench`."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from device_agent.formats.manifest import MANIFEST
from device_agent.profiling.profile_text import table
from device_agent.profiling.profiler import profile_bundle
from profiles.documents.bundle_profile import Profile
from profiles.errors import EdgeTailorError, InputError
from profiles.text_formatting import UNKNOWN_CELL, megabytes

BENCH_VERSION = 1
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BenchRow:
    """The result for one bundle: its profile, or the error that ended the measurement."""

    name: str
    profile: Profile | None = None
    error: EdgeTailorError | None = None

    @property
    def seconds(self) -> float | None:
        """Median time of all training work for one batch, in seconds."""
        steps = self.profile.of_role("train") if self.profile else []
        return steps[0].steady.median_s if steps else None

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of the process that trains, in bytes, with Python and the runtime."""
        return self.profile.peak_bytes if self.profile else None


def bundles_in(places: Iterable[Path]) -> Iterator[Path]:
    """The bundles among `places` and directly in them, by name.

    Raises:
        InputError: A place is no bundle and has none.
    """
    for place in places:
        inside = sorted(path.parent for path in place.glob(f"*/{MANIFEST}"))
        if not (place / MANIFEST).exists() and not inside:
            raise InputError(
                f"{place} is no bundle and has no bundles in it. Give a folder that `edgetailor "
                "export` wrote, or a folder of such folders.",
                code="bundle.none-found",
                folder=str(place),
            )
        yield from [place] if (place / MANIFEST).exists() else inside


def measure_each(
    places: Iterable[Path], threads: int, runs: int, runtime: str | None = None
) -> list[BenchRow]:
    """Profile every bundle in `places`; see `bundles_in`.

    Args:
        places: Bundles, or folders of bundles.
        threads: Threads of the runtime; 0 for as many as the machine has cores.
        runs: Measured runs of each phase.
        runtime: Library that runs ONNX bundles, see TrainingOptions.

    Returns:
        One row for each bundle. A bundle that cannot be measured has an error.

    Raises:
        InputError: A place has no bundle.
    """
    rows = []
    for bundle in list(bundles_in(places)):
        logger.info("measuring %s", bundle.name)
        try:
            found = profile_bundle(bundle, threads, runs=runs, runtime=runtime)
            rows.append(BenchRow(bundle.name, found))
        except EdgeTailorError as error:
            rows.append(BenchRow(bundle.name, error=error))
    return rows


def bench_table(rows: Sequence[BenchRow]) -> list[str]:
    """`rows` as lines of text."""

    def cells(row: BenchRow) -> tuple[str, ...]:
        seconds, profile = row.seconds, row.profile
        return (
            row.name,
            profile.submodel if profile else UNKNOWN_CELL,
            str(profile.batch_size) if profile else UNKNOWN_CELL,
            UNKNOWN_CELL if seconds is None else f"{seconds:.3f}",
            megabytes(row.peak_bytes),
        )

    about = next((row.profile.machine for row in rows if row.profile), None)
    return [
        *table([("bundle", "submodel", "batch", "s/batch", "peak MB"), *map(cells, rows)]),
        *([f"{about.runtime} on {about.processor or about.architecture}"] if about else []),
        *(f"{row.name}: {row.error}" for row in rows if row.error),
    ]


def as_document(rows: Sequence[BenchRow]) -> dict[str, object]:
    """The document that `bench --json` prints."""
    return {
        "version": BENCH_VERSION,
        "bundles": [
            {
                "name": row.name,
                "submodel": row.profile and row.profile.submodel,
                "batch_size": row.profile and row.profile.batch_size,
                "seconds_per_batch": row.seconds,
                "peak_bytes": row.peak_bytes,
                "error": row.error and str(row.error),
                "code": row.error and row.error.code,
            }
            for row in rows
        ],
    }
