"""Whether a submodel fits in the memory that a device allows, and what a refusal says."""

import re

import msgspec

from bundles import BundleOf
from device_agent.formats.bundle import open_bundle
from device_agent.training.memory_limits import Ceiling
from device_agent.training.memory_refusal import check_fits
from profiles.errors import LimitError
from refusals import refused


def test_the_tightest_limit_is_named(bundle_of: BundleOf) -> None:
    manifest = open_bundle(bundle_of("slice")).manifest
    wide, tight = Ceiling("wide", 10**12, 10**6), Ceiling("tight", 75_000_000, 58_000_000)
    check_fits(manifest, False, [wide])
    check_fits(manifest, False, [])
    with refused(
        "memory.does-not-fit",
        limit="tight",
        limit_bytes=75_000_000,
        idle_bytes=58_000_000,
        fitting_peak_bytes=10_700_000,
    ) as error:
        check_fits(manifest, False, [wide, tight])
    assert isinstance(error.value, LimitError)
    assert re.search(
        r"58\.0MB of .*, but tight allows only 75\.0MB\. .* at most 10\.7MB\.$", str(error.value)
    )


def test_a_limit_below_the_idle_agent_leaves_no_submodel(bundle_of: BundleOf) -> None:
    manifest = open_bundle(bundle_of("slice")).manifest
    low = Ceiling("ulimit", 2**20, 2**26)
    with refused("memory.does-not-fit", limit="ulimit", fitting_peak_bytes=None) as error:
        check_fits(manifest, False, [low])
    assert re.search(
        r"not fit: the idle agent alone uses 67\.2MB, but ulimit allows only 1\.1MB\. Allow at "
        r"least [\d.]+MB\.$",
        str(error.value),
    )
    # The runtime's first session alone needs more than what is left.
    little = Ceiling("ulimit", 2**26 + 12_000_000, 2**26)
    with refused("memory.does-not-fit", limit="ulimit", fitting_peak_bytes=None) as error:
        check_fits(manifest, False, [little])
    assert re.search(r"the idle agent, but ulimit .* at least [\d.]+MB\.$", str(error.value))


def test_the_submodel_that_a_refusal_asks_for_fits(bundle_of: BundleOf) -> None:
    """A submodel with the named peak fits, and one with a tenth of a megabyte more does not."""
    manifest = open_bundle(bundle_of("full")).manifest
    limit = Ceiling("--max-memory", 80_000_000, 61_234_567)

    def asking(peak: int) -> msgspec.Struct:
        train = msgspec.structs.replace(manifest.signatures["train"], peak_bytes=peak)
        return msgspec.structs.replace(manifest, signatures={"train": train})

    with refused("memory.does-not-fit") as error:
        check_fits(asking(50_000_000), False, [limit])
    named = re.search(r"peak memory of at most ([\d.]+)MB", str(error.value))
    assert named is not None
    most = round(float(named[1]) * 10**6)
    assert error.value.values["fitting_peak_bytes"] == most
    check_fits(asking(most), False, [limit])
    with refused("memory.does-not-fit"):
        check_fits(asking(most + 10**5), False, [limit])
