"""A round without a coordinator: a bundle that was copied here, an update to copy back."""

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from device_agent.formats.bundle import manifest_bytes, read_manifest
from device_agent.formats.manifest import MANIFEST
from device_agent.formats.update import UpdateRecord
from device_agent.training.bundle_training import train_bundle
from device_agent.training.personal_model import personal_entries, read_personal, write_personal
from device_agent.training.schedule_interpreter import OnEpoch, quiet

log = logging.getLogger(__name__)
LOST = (
    "This bundle has a personal model, which ends with this round: --personal FILE.safetensors "
    "keeps it."
)


def train_alone(
    bundle: Path,
    data: str,
    out: Path,
    personal: Path | None = None,
    *,
    threads: int = 0,
    seed: int = 0,
    validation: float = 0.0,
    max_memory: int | None = None,
    on_epoch: OnEpoch = quiet,
    force: bool = False,
) -> UpdateRecord:
    """Train as `train_bundle` does, from and to the personal model in the file `personal`.

    Without the file a personal model is lost, which is logged. Raises InputError for a file of
    another submodel, and the errors of training; then the file is as it was.
    """
    manifest = read_manifest(manifest_bytes(bundle), bundle / MANIFEST)
    if personal is None and personal_entries(manifest):
        log.warning(LOST)
    keep = personal if personal_entries(manifest) else None

    def keep_own(tensors: Mapping[str, np.ndarray]) -> None:
        if keep is not None:
            write_personal(keep, tensors, manifest)

    return train_bundle(
        bundle,
        data,
        out,
        threads=threads,
        seed=seed,
        validation=validation,
        max_memory=max_memory,
        personal=None if keep is None else read_personal(keep, manifest),
        keep=keep_own,
        on_epoch=on_epoch,
        force=force,
    ).record
