"""What a demo found."""

from dataclasses import dataclass
from pathlib import Path

from device_agent.formats.protocol import RoundResult
from profiles.documents.bundle_profile import Profile
from toolkit.demo.demo_folder import CURVE


@dataclass(frozen=True)
class DeviceReport:
    """One device: its part of the data, its submodel's size, its traffic and its cost.

    Bytes count bodies over all rounds; `profile` was measured after the last one, when no agent ran
    any more, and is shared by the devices of one submodel.
    """

    name: str
    submodel: str
    samples: int
    params: int
    capacity: float
    bytes_down: int
    bytes_up: int
    profile: Profile


@dataclass(frozen=True)
class DemoResult:
    """A whole demo; `elapsed_s` in seconds, `history` from round 0 (before training) on."""

    out: Path
    seed: int
    all_full: bool
    held_out_samples: int
    elapsed_s: float
    history: tuple[RoundResult, ...]
    devices: tuple[DeviceReport, ...]

    @property
    def curve(self) -> Path:
        """The accuracy curve, a PNG."""
        return self.out / CURVE

    @property
    def accuracy(self) -> float:
        """The last round's accuracy on the held-out digits, from 0 to 1."""
        accuracy = self.history[-1].accuracy
        assert accuracy is not None  # digits are classes
        return accuracy

    @property
    def rounds(self) -> int:
        """How many rounds there were."""
        return self.history[-1].round
