"""Simulated time: how long a client's device would take for a round.

The device downloads the tensors of its submodel, records activations (only for slices), trains and
uploads, one after another:

    8 * down / download + slowdown * (stages * recorded batches + step * batches) + 8 * up / upload

Bytes and graphs come from the planner's workloads. The time of a batch is the planner's prediction
from the device's calibration. An incomplete batch counts as a full batch. With a budget, a client
trains fewer batches. The evaluation of held-out samples and the start of the runtime are not
counted.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from device_agent.training.batching import batches, held_out
from profiles.cost_model.prediction import TimeModel, predict
from profiles.cost_model.workload import Workload
from profiles.documents.calibration_record import Calibration
from profiles.documents.device_profile import load_device
from profiles.errors import DataError, InputError
from toolkit.coordinator.federation_file.device_kinds import DeviceKind
from toolkit.submodels.hyperparameters import TrainingConfig

MEGA = 1e6


@dataclass(frozen=True, kw_only=True)
class SimulatedDevice:
    """The speed of the devices of one kind.

    Attributes:
        calibration: The times of operations.
        slowdown: Factor by which each operation takes longer than in the calibration.
        down_bits_per_s: Speed of downloads.
        up_bits_per_s: Speed of uploads.
    """

    calibration: Calibration
    slowdown: float
    down_bits_per_s: float
    up_bits_per_s: float

    def cost(self, work: Workload) -> "Cost":
        """The times and the memory of a submodel with the workload `work`.

        Raises InputError if the calibration lacks the time of a kind of operation.
        """
        model = TimeModel(self.calibration)
        memory = predict(work, self.calibration).memory.upper
        work = model.fastest(work)
        stages = sum(model.batch([stage]).value for stage in work.recording)
        return Cost(
            transfer_s=8 * work.down / self.down_bits_per_s + 8 * work.up / self.up_bits_per_s,
            record_s=self.slowdown * stages,
            step_s=self.slowdown * model.batch(work.training).value,
            memory=memory,
        )


class Cost(NamedTuple):
    """The times of a submodel on a device, in seconds, and its memory.

    `transfer_s` is the time of a round's download and upload. `record_s` is the time to run a batch
    through all recorded stages. `step_s` is the time to train on a batch. `memory` is the upper
    bound of the agent's peak, in bytes.
    """

    transfer_s: float
    record_s: float
    step_s: float
    memory: float


def simulated_device(kind: DeviceKind) -> SimulatedDevice:
    """The simulated device of `kind`, which has a profile.

    Raises:
        InputError: The profile cannot be read or was never calibrated, or the speed of the network
            is unknown.
    """
    device = load_device(str(kind.profile))
    if device.calibration is None:
        raise InputError(
            'The profile {profile} of the kind "{device}" has no calibration, so the time of a '
            "batch is unknown. Give a file that `edgetailor-agent calibrate --out FILE` wrote; "
            "with the file of a faster device, set `slowdown`, too.",
            code="simulation.no-calibration",
            device=kind.name,
            profile=kind.profile,
        )

    def speed(key: str, given: float | None, known: int | None) -> float:
        if given is not None:
            return MEGA * given
        if known is None:
            raise InputError(
                "The profile {profile} does not state the speed of the network: set `{key}` for "
                'the kind "{device}".',
                code="simulation.no-network-speed",
                device=kind.name,
                key=key,
                profile=kind.profile,
            )
        return float(known)

    return SimulatedDevice(
        calibration=device.calibration,
        slowdown=kind.slowdown or 1.0,
        down_bits_per_s=speed("download_mbps", kind.download_mbps, device.down_bits_per_s),
        up_bits_per_s=speed("upload_mbps", kind.upload_mbps, device.up_bits_per_s),
    )


@dataclass(frozen=True)
class Clock:
    """The simulated times of clients.

    Attributes:
        devices: The devices, by the name of their kind.
        works: The workloads, by submodel.
        training: How devices train.
        validation: Share of its samples that a client holds out.
        budget_s: Seconds that a client may compute in a round; None without a limit.
    """

    devices: Mapping[str, SimulatedDevice]
    works: Mapping[str, Workload]
    training: TrainingConfig
    validation: float = 0.0
    budget_s: float | None = None
    costs: dict[tuple[str, str], Cost] = field(default_factory=dict, init=False)

    def seconds(self, kind: str, spec: str, samples: int) -> float:
        """The time of a round for a client of `kind` that trains `spec` on `samples` samples."""
        cost, recorded = self.cost(kind, spec), self.batches_of(samples)
        trained = self.trained_batches(kind, spec, samples)
        return cost.transfer_s + recorded * cost.record_s + trained * cost.step_s

    def trained_batches(self, kind: str, spec: str, samples: int) -> int:
        """How many batches a client of `kind` trains in a round, with `spec` and `samples` samples.

        With a budget, the client stops after the batch in which the budget is used up, as an agent
        does.
        """
        work = self.training.local_work
        trained = work.epochs * self.batches_of(samples - self.held_out_of(samples))
        if work.batches is not None:
            trained = min(trained, work.batches)
        if self.budget_s is None:
            return trained
        cost = self.cost(kind, spec)
        left = self.budget_s - self.batches_of(samples) * cost.record_s
        return min(trained, max(1, math.ceil(left / cost.step_s)))

    def memory(self, kind: str, spec: str) -> float:
        """The memory of `spec` on the devices of `kind`, in bytes."""
        return self.cost(kind, spec).memory

    def cost(self, kind: str, spec: str) -> Cost:
        """The times and the memory of `spec` on the devices of `kind`."""
        if (kind, spec) not in self.costs:
            self.costs[kind, spec] = self.devices[kind].cost(self.works[spec])
        return self.costs[kind, spec]

    def batches_of(self, samples: int) -> int:
        """The number of batches for `samples` samples."""
        return len(batches(samples, self.training.batch_size, None))

    def held_out_of(self, samples: int) -> int:
        """The number of samples that a client holds out; 0 if it has too few."""
        with suppress(DataError):
            return len(held_out(samples, self.validation))
        return 0
