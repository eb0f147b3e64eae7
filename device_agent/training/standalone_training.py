"""Trains one round without a coordinator. The user copies the files to and from the device.

This is the public function `edgetailor.train`.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from device_agent.data.data_source import Data
from device_agent.formats.bundle import manifest_bytes, read_manifest
from device_agent.formats.manifest import MANIFEST
from device_agent.formats.update import UpdateRecord
from device_agent.privacy.sample_accountant import SampleSteps, epsilon_of
from device_agent.training.bundle_training import train_bundle
from device_agent.training.personal_model import personal_entries, read_personal, write_personal
from device_agent.training.schedule_interpreter import OnEpoch, ignore_epoch
from device_agent.training.training_options import TrainingOptions

log = logging.getLogger(__name__)
LOST = (
    "The personal model of this bundle is lost after this training. Use --personal "
    "FILE.safetensors to keep it."
)


def _log_spent(steps: SampleSteps, delta: float) -> None:
    """Log the privacy that the samples spend in this training."""
    log.info(
        "This training spends epsilon %.3g at delta %g of the samples' privacy. Earlier trainings "
        "are not counted.",
        epsilon_of([steps], delta), delta,
    )  # fmt: skip


def train(
    bundle: str | Path,
    data: Data,
    out: str | Path,
    *,
    personal: str | Path | None = None,
    threads: int = 0,
    seed: int = 0,
    validation: float = 0.0,
    max_memory: int | None = None,
    on_epoch: OnEpoch = ignore_epoch,
    force: bool = False,
) -> UpdateRecord:
    """Train a bundle on local data and write the update.

    Use this on a device that gets bundles as files. If there is a coordinator, run
    `edgetailor-agent run` instead.

    If the process is interrupted or killed, call `train` again with the same arguments: the
    training continues from its last checkpoint. Progress is logged with the standard library's
    `logging`.

    Args:
        bundle: Folder of the bundle.
        data: Samples `x` of shape (n, *sample shape) and labels `y`: (n,), or (n, ...) with a label
            for each position of the model's output. Pass an .npz file, a folder of x.npy and y.npy,
            `module:callable`, a pair of arrays or a mapping with the keys `x` and `y`. If the
            bundle has `preprocessing`, CSV files or a folder of pictures for each class are also
            allowed.
        out: Folder for the update. It must not exist, unless `force` is set.
        personal: File of the personal model of a `cp` or `pfedme` bundle. If the file exists, it is
            read. After training, it is written. Without this argument, the personal model is lost,
            and a warning is logged.
        threads: Threads of the runtime. 0 means one for each core.
        seed: Seed for the order of the samples and for dropout.
        validation: Share of the samples, in [0, 1), that is held out and evaluated after each
            epoch.
        max_memory: Bytes of memory that this process may use; None for no limit.
        on_epoch: Called after each epoch with its number, the number of epochs and the mean loss.
        force: Replace an existing update in `out`.

    Returns:
        The record of the update: losses, steps, samples and the list of tensors.

    Raises:
        BundleError: The bundle is incomplete, damaged or of another format version.
        DataError: The data do not fit the bundle, or a disk is full (StorageError).
        LimitError: The training needs more memory than it may use, or more than is free.
        UpdateError: The training diverged.
        InputError: `out` or `personal` cannot be used. Nothing was changed.

    Examples:
        >>> import tempfile
        >>> import edgetailor as et
        >>> import numpy as np
        >>> model = et.load_model("toolkit.models:digits_cnn")
        >>> submodel = et.split(model, "full", sample_shape=(1, 8, 8))
        >>> state = et.GlobalModel(model.state_dict())
        >>> x, y = np.zeros((20, 1, 8, 8), np.float32), np.arange(20) % 10
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = et.export(submodel, state, f"{folder}/bundle", verify=False)
        ...     record = et.train(f"{folder}/bundle", (x, y), f"{folder}/update")
        >>> record.samples
        20
    """
    folder = Path(bundle)
    manifest = read_manifest(manifest_bytes(folder), folder / MANIFEST)
    has_personal_model = bool(personal_entries(manifest))
    if personal is None and has_personal_model:
        log.warning(LOST)
    file = Path(personal) if personal is not None and has_personal_model else None

    def keep(tensors: Mapping[str, np.ndarray]) -> None:
        if file is not None:
            write_personal(file, tensors, manifest)

    options = TrainingOptions(
        threads=threads, seed=seed, validation=validation, max_memory=max_memory
    )
    return train_bundle(
        folder,
        data,
        out,
        options,
        personal=None if file is None else read_personal(file, manifest),
        keep=keep,
        spend=_log_spent,
        on_epoch=on_epoch,
        force=force,
    ).record
