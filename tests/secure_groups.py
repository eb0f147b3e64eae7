"""Groups of devices that add up their vectors in memory, with losses at each step."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.formats.protocol.secure_sums import SecureMember, SecureTerms, Step
from device_agent.privacy.secret_sharer import SecretSharer
from device_agent.privacy.secret_sum import SecretSum

ROUND, BUNDLE = 3, "ab" * 32
Vectors = Mapping[str, np.ndarray]


@dataclass
class Group:
    """Devices with their vectors, which go through the steps of a sum one after another."""

    vectors: dict[str, np.ndarray]
    fewest: int = 3
    sharers: dict[str, SecretSharer] = field(init=False)
    terms: SecureTerms = field(init=False)
    members: list[SecureMember] = field(init=False)
    inputs: dict[str, np.ndarray] = field(init=False, default_factory=dict)
    sum: SecretSum = field(init=False)

    def __post_init__(self) -> None:
        self.terms = SecureTerms(fewest=self.fewest, most_change=1.0, most_samples=100)
        keys = {device: DeviceKey.new() for device in self.vectors}
        self.sharers = {
            device: SecretSharer(device, key.signature, key.public, ROUND, BUNDLE, self.terms)
            for device, key in keys.items()
        }
        self.members = [
            SecureMember(device=device, key=keys[device].public, keys=sharer.keys)
            for device, sharer in self.sharers.items()
        ]
        self.sum = SecretSum(ROUND, self.members, self.fewest)

    def answer(self, step: Step, lost: Collection[str] = ()) -> None:
        """Let all devices that are asked answer `step`, without those that are `lost`."""
        assert self.sum.step == step
        for device in sorted(self.sum.waits_for - set(lost)):
            self._answer(device)
        self.sum.advance()

    def _answer(self, device: str) -> None:
        sharer, asked = self.sharers[device], self.sum.step_of(device)
        if asked.step == "shares":
            assert self.sum.take_shares(device, sharer.shares(asked.members))
        elif asked.step == "input":
            self.inputs[device] = sharer.masked(asked.shares, self.vectors[device].copy())
            self.sum.take_input(device)
        elif asked.step == "confirm":
            assert self.sum.take_confirmation(device, sharer.confirmed(asked.present))
        else:
            unmasking = sharer.unmasking(asked.present, asked.confirmations)
            self.sum.take_unmasking(device, unmasking)

    def run(self, lost: Mapping[Step, Collection[str]] | None = None) -> np.ndarray:
        """All steps, with the devices that are `lost` at each. Returns the sum."""
        gone: set[str] = set()
        steps: Sequence[Step] = ("shares", "input", "confirm", "unmask")
        for step in steps:
            gone |= set((lost or {}).get(step, ()))
            self.answer(step, gone)
        return self.total()

    def total(self) -> np.ndarray:
        return self.sum.total(self.inputs[device] for device in self.sum.present)


def drawn(devices: int, draw: np.random.Generator, elements: int = 40) -> dict[str, np.ndarray]:
    """Random vectors of `devices`."""
    return {
        f"device-{number}": draw.integers(2**32, size=elements, dtype=np.uint32)
        for number in range(devices)
    }


def plain_sum(vectors: Vectors, devices: Collection[str]) -> np.ndarray:
    """The oracle: numpy's sum modulo 2^32."""
    total = np.zeros_like(next(iter(vectors.values())))
    for device in devices:
        total += vectors[device]
    return total


def a_fifth(devices: Collection[str], draw: np.random.Generator) -> list[str]:
    return list(draw.choice(sorted(devices), len(devices) // 5, replace=False))
