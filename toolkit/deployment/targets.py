"""The inference bundles to make: for which devices, and in which folders. Needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from device_agent.formats.bundle_place import check_bundle_place, foreign_file
from profiles.cost_model.memory_rule import TRAINING_RESERVE_BYTES, UNCALIBRATED
from profiles.documents.device_profile import DeviceProfile
from profiles.errors import InputError
from profiles.text_formatting import did_you_mean
from toolkit.coordinator.federation_file.federation_config import FederationConfig
from toolkit.deployment.card_fields import Format, Precision
from toolkit.deployment.predicting_submodel import (
    PLANNED,
    PredictingSubmodel,
    predicting_submodel,
)
from toolkit.exporting.tier_files import tiers_of


@dataclass(frozen=True)
class Target:
    """An inference bundle to write.

    Attributes:
        out: The bundle's folder.
        trained: The submodel that the devices train; `auto` if a plan chooses it for each device.
        submodel: The submodel with which the devices predict, and the reason.
        kind: The devices' kind; None outside a federation.
        memory: The memory budget of the agent's process in bytes; None without a budget.
        format: The format of the graph.
        precision: The precision of the weights.
        profile: The device whose time is predicted.
        force: Replace an existing bundle.
    """

    out: Path
    trained: str
    submodel: PredictingSubmodel
    kind: str | None = None
    memory: int | None = None
    format: Format = "onnx"
    precision: Precision = "float32"
    profile: DeviceProfile | None = None
    force: bool = False

    @property
    def name(self) -> str:
        """The name of the bundle in messages."""
        return self.kind or self.out.name

    def fits(self, memory: int | None) -> bool:
        """Whether predictions fit the budget.

        Predictions need `memory` bytes more than an idle agent. True if the budget or `memory` is
        unknown.
        """
        return None in (self.memory, memory) or needed_bytes(memory or 0) <= (self.memory or 0)


def needed_bytes(memory: int) -> int:
    """The memory limit for an agent whose predictions need `memory` more bytes than idling."""
    return UNCALIBRATED.idle_bytes + memory + TRAINING_RESERVE_BYTES


def kind_targets(config: FederationConfig, names: Sequence[str], out: Path) -> list[Target]:
    """The targets for the kinds `names` of a federation, each in a folder of its own.

    Args:
        config: The federation's file.
        names: Names of kinds; empty means all kinds.
        out: The folder in which each bundle gets a folder.

    Raises:
        InputError: The federation has no kind with such a name.
    """
    known = [kind.name for kind in config.devices]
    for name in names:
        if name not in known:
            raise InputError(
                "The federation has no kind {kind!r}{did_you_mean} Its kinds are {kinds}.",
                code="deploy.unknown-kind",
                kind=name,
                kinds=known,
                did_you_mean=did_you_mean(name, known),
            )
    return [
        Target(
            out / kind.name,
            kind.submodel,
            PLANNED if kind.planned else predicting_submodel(kind.submodel),
            kind.name,
            kind.memory,
        )
        for kind in config.devices
        if not names or kind.name in names
    ]


def check_tree(out: Path) -> None:
    """Raise InputError if `out`, the folder for several bundles, contains anything except bundles.

    Without this check, bundles could be written among the files of a state folder, for example.
    """
    if not out.is_dir():
        return  # other errors are found for each bundle
    for path in sorted(out.iterdir()):
        if not path.name.startswith(".") and not (
            path.is_dir() and any(path.iterdir()) and foreign_file(path) is None
        ):
            raise InputError(
                "{path} is not a folder of bundles: it has {other}. Give a new folder.",
                code="deploy.other-folder",
                path=str(out),
                other=path.name,
            )


def spec_targets(specs: Sequence[str], out: Path) -> list[Target]:
    """The targets for submodels. A single bundle is written to `out`, several to folders in `out`.

    Raises SpecError or InputError if a spec is wrong or is given twice.
    """
    tiers = tiers_of(specs or ["full"])
    several = len(tiers) > 1
    return [
        Target(
            out / tier.name if several else out,
            tier.submodel,
            predicting_submodel(tier.submodel),
        )
        for tier in tiers
    ]


def with_options(
    targets: Sequence[Target],
    format: Format,
    precision: Precision,
    profile: DeviceProfile | None,
    force: bool,
) -> list[Target]:
    """Return `targets` with these attributes. Raises InputError if a bundle cannot be written."""
    for target in targets:
        check_bundle_place(target.out, force)
    return [
        replace(target, format=format, precision=precision, profile=profile, force=force)
        for target in targets
    ]
