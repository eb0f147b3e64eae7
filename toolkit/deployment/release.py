"""Makes a release of a federation: inference bundles with the model of a round, for devices."""

import logging
from collections.abc import Sequence
from pathlib import Path

from exporters.programs.program import inference_program
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.releases.release_changes import add_release
from toolkit.coordinator.storage.release_folder import Release
from toolkit.deployment.card_fields import Precision
from toolkit.deployment.deploy_targets import deploy_targets
from toolkit.deployment.fine_tuning_bundles import write_training_bundles
from toolkit.deployment.targets import kind_targets, with_options
from toolkit.deployment.trained_model import from_federation

logger = logging.getLogger(__name__)


def make_release(
    config: CoordinatorConfig,
    round_: int,
    kinds: Sequence[str] = (),
    *,
    share: float | None = None,
    then_all: bool = False,
    precision: Precision = "float32",
    calibration: str | None = None,
    fine_tune: int = 0,
) -> Release:
    """Make a release of the model of `round_`, and offer it to devices.

    Args:
        config: The federation's file. `edgetailor serve` may run on its state folder.
        round_: The round, see `edgetailor rounds`.
        kinds: The kinds of devices that get the release; empty for all.
        share: The share of the devices that get the release first; None for all devices.
        then_all: Whether all devices get the release after this share has installed it.
        precision: The precision of the weights.
        calibration: Samples to calibrate int8. Default: as for `from_federation`.
        fine_tune: Number of steps for which devices may train the release on their own samples; 0
            if devices must not train it.

    Raises:
        InputError: The round's model is missing, a kind is unknown, or the previous release is
            still offered to only a share of the devices.
        EdgeTailorError: A bundle cannot be made. Then nothing is released.
    """
    trained = from_federation(config, round_, calibration=calibration)
    if inference_program(trained.program).output == "outputs":
        logger.warning(
            "Devices take this release without comparing it with their present model: only the "
            "loss %s knows what the outputs mean.",
            config.training.loss,
        )
    names = [target.kind or "" for target in kind_targets(config, kinds, Path())]

    def write(folder: Path) -> None:
        targets = kind_targets(config, names, folder)
        outcomes = deploy_targets(trained, with_options(targets, "onnx", precision, None, False))
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        if fine_tune:
            write_training_bundles(config, round_, names, fine_tune, folder)

    return add_release(config.state, round_, names, write, share, then_all, precision, fine_tune)
