"""The figures of a demo."""

from dataclasses import dataclass
from pathlib import Path

from device_agent.formats.evaluation_counts import LocalEvaluation
from device_agent.formats.protocol.fleet import RoundResult
from profiles.documents.bundle_profile import Profile
from toolkit.demo.baselines import Baselines
from toolkit.demo.demo_folder import CURVE
from toolkit.demo.deployed_models import DeployedModel


@dataclass(frozen=True)
class DeviceReport:
    """The figures of one device.

    Attributes:
        name: The device's name.
        submodel: The spec that it trains.
        samples: Size of its local data.
        params: Parameters that it trains.
        capacity: Load of the submodel relative to the full model.
        bytes_down: Bytes of all HTTP bodies that it received.
        bytes_up: Bytes of all HTTP bodies that it sent.
        evaluation: How the received model and the device's own model predict the samples that the
            device keeps apart, in the last round.
        correct: How many of the new digits the device predicts correctly with the deployed model.
        profile: Time and memory of one batch, measured after the last round when no agent was
            running. Devices with the same submodel share one profile.
    """

    name: str
    submodel: str
    samples: int
    params: int
    capacity: float
    bytes_down: int
    bytes_up: int
    evaluation: LocalEvaluation | None
    correct: int
    profile: Profile


@dataclass(frozen=True)
class TrainingMemory:
    """The peak memory of training a submodel.

    `above_idle_bytes` is the peak minus the memory of an agent that does not train; None if it is
    not measurable.
    """

    submodel: str
    above_idle_bytes: int | None


@dataclass(frozen=True)
class DemoResult:
    """A whole demo.

    Attributes:
        out: The demo's folder.
        seed: Seed of data split and training.
        all_full: Whether every device trained the full model.
        held_out_samples: The number of samples on which the global model is judged.
        elapsed_s: How long the demo took, in seconds.
        history: The fleet's rounds, from round 0 (before training) on.
        devices: The figures of each device.
        baselines: The accuracies that the fleet is compared with.
        larger_model: Memory of training on the larger model.
        deployed: The files with which devices predict.
    """

    out: Path
    seed: int
    all_full: bool
    held_out_samples: int
    elapsed_s: float
    history: tuple[RoundResult, ...]
    devices: tuple[DeviceReport, ...]
    baselines: Baselines
    larger_model: tuple[TrainingMemory, ...]
    deployed: tuple[DeployedModel, ...]

    @property
    def curve(self) -> Path:
        """The charts, a PNG: accuracy by round, memory by submodel, traffic by device."""
        return self.out / CURVE

    @property
    def accuracy(self) -> float:
        """The accuracy on the held-out digits after the last round, from 0 to 1."""
        accuracy = self.history[-1].accuracy
        assert accuracy is not None  # digits are classes
        return accuracy

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return self.history[-1].round
