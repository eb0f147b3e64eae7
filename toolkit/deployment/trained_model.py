"""Reads the trained model to deploy, from a round of a federation or from a weights file."""

import logging
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import nn

from device_agent.data.local_data import load_data
from device_agent.formats.preprocessing import Preprocessing
from device_agent.formats.protocol.fleet import FederatedEvaluation, SpentPrivacy
from exporters.objectives.loss_text import is_own
from exporters.programs.program import Program, with_preprocessing
from exporters.recording.capture import SharedRecording, capture
from exporters.recording.inputs.sample_range import NO_INPUTS, Inputs
from exporters.recording.model_output import OutputForm
from profiles.errors import InputError
from profiles.text_formatting import counted
from toolkit.coordinator.database.key_log import KEY
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.storage.saved_rounds import model_file, saved_rounds
from toolkit.evaluation_sums import Evaluation
from toolkit.model_evaluation import evaluate
from toolkit.splitting import split
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.model_loading import load_global
from toolkit.submodels.submodel import Submodel

logger = logging.getLogger(__name__)

CALIBRATED = 512
"""The most samples that calibrate int8."""

Samples = str | Path | tuple[np.ndarray, np.ndarray]
"""Samples and labels, or the path to read them from; see `load_data`."""


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A model with trained weights, and the facts about it for a model card.

    Attributes:
        name: The model's name in the card.
        module: The PyTorch model with the trained weights.
        weights: The trained weights as a global model.
        sample_shape: Shape of one sample, without the batch.
        training: How it was trained; the loss gives the meaning of its output.
        preprocessing: How pictures or CSV files become samples.
        round: The round after which it was taken; None if it comes from no federation.
        key: The coordinator's key, which signs cards; None if it comes from no federation.
        devices: How the devices judged the model of this round; None if they did not judge it.
        privacy: The privacy budget that the rounds up to this one have spent, or None.
        data: Samples and labels, or the path to read them from; None for a card without accuracy.
        calibration: Samples and labels to calibrate int8; None to take `data`.
    """

    name: str
    module: nn.Module
    weights: GlobalModel
    sample_shape: tuple[int, ...]
    training: TrainingConfig
    preprocessing: Preprocessing | None = None
    round: int | None = None
    key: CoordinatorKey | None = None
    devices: FederatedEvaluation | None = None
    data: Samples | None = None
    calibration: Samples | None = None
    privacy: SpentPrivacy | None = None
    recording: SharedRecording = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "recording", SharedRecording(self.module, self.sample_shape))

    def split(self, spec: str) -> Submodel:
        """Cut the submodel `spec`. The model is recorded once for all submodels."""
        with self.recording:
            return split(self.module, spec, self.sample_shape, self.training)

    @property
    def outputs(self) -> OutputForm:
        """The outputs of the model."""
        with self.recording:
            own = is_own(self.training.loss)
            return capture(self.module, self.sample_shape, own).outputs

    @cached_property
    def program(self) -> Program:
        """The program of the whole model with its preprocessing.

        Raises InputError if model and preprocessing do not fit together.
        """
        return with_preprocessing(self.split("full").program, self.preprocessing)

    @cached_property
    def held_out(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The samples and labels of `data`. Raises DataError unless they fit the model."""
        return None if self.data is None else self.samples(self.data)

    @cached_property
    def calibration_samples(self) -> np.ndarray:
        """At most CALIBRATED samples to calibrate int8. Raises InputError if there are none."""
        samples = self.held_out if self.calibration is None else self.samples(self.calibration)
        if samples is None:
            raise InputError(
                "int8 needs samples that show the range of each activation: give --calibrate FILE "
                "or --data FILE.",
                code="deploy.no-calibration",
            )
        x = samples[0]
        # Spread over all samples, because files are often sorted by class.
        chosen: np.ndarray = x[np.linspace(0, len(x) - 1, min(len(x), CALIBRATED)).astype(int)]
        return chosen

    def samples(self, source: Samples) -> tuple[np.ndarray, np.ndarray]:
        """Read samples and labels. Raises DataError unless they fit the model."""
        program = self.program
        local = load_data(
            source,
            self.sample_shape,
            program.labels,
            program.sample_dtype,
            program.sample_limit,
            least=1,
            preprocessing=self.preprocessing,
            parts=program.parts,
        )
        return np.array(local.x), np.array(local.y)

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """Accuracy and loss of the model in PyTorch on held-out data; None without such data."""
        if self.held_out is None:
            return None
        logger.info(
            "evaluating the model in PyTorch on %s", counted(len(self.held_out[0]), "sample")
        )
        x, y = self.held_out
        return evaluate(self.module, x, y, "The held-out data", self.training.loss)


def from_federation(
    config: CoordinatorConfig,
    round_: int,
    data: str | Path | None = None,
    calibration: str | Path | None = None,
) -> TrainedModel:
    """Load the global model of a federation after a round.

    Args:
        config: The federation's file.
        round_: The number of the round; see `round_of`.
        data: Held-out data in place of the federation's held-out data.
        calibration: Samples to calibrate int8. Default: the federation's `statistics`, else the
            held-out data.

    Raises:
        ModelError: The model cannot be loaded.
        InputError: The round's model is missing, or does not fit the model in `config`.
    """
    file = model_file(config.state, round_)
    logger.info("loading the model %s after round %d", config.model, round_)
    module, weights = load_global(config.model, file, config.seed, config.known_inputs())
    saved = next(saved for saved in saved_rounds(config.state) if saved.round == round_)
    return TrainedModel(
        config.model,
        module,
        weights,
        config.input_shape,
        config.training,
        config.data,
        round_,
        read_key(config.state),
        saved.devices,
        config.held_out if data is None else data,
        config.statistics if calibration is None else calibration,
        saved.privacy,
    )


def read_key(state: Path) -> CoordinatorKey:
    """The coordinator's key in a state folder. Raises InputError if it cannot be read."""
    path = state / KEY
    try:
        key = CoordinatorKey.from_pem(path.read_bytes())
    except OSError:
        key = None
    if key is None:
        raise InputError(
            "{path}, the coordinator's key, is missing or damaged, so the model card cannot be "
            "signed. Restore it from a backup.",
            code="deploy.no-key",
            path=str(path),
        )
    return key


def from_reference(
    reference: str,
    weights: Path,
    sample_shape: tuple[int, ...],
    training: TrainingConfig,
    preprocessing: Preprocessing | None = None,
    data: str | Path | None = None,
    calibration: str | Path | None = None,
    inputs: Inputs = NO_INPUTS,
) -> TrainedModel:
    """Load a model from its reference and a weights file. Raises ModelError or InputError."""
    logger.info("loading the model")
    module, numbers = load_global(reference, weights, inputs=inputs)
    return TrainedModel(
        reference,
        module,
        numbers,
        sample_shape,
        training,
        preprocessing,
        data=data,
        calibration=calibration,
    )
