"""Closes a round with secure sums: devices go through the steps, and each group is one update."""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
from safetensors.numpy import load_file

from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import MANIFEST, WEIGHTS, Manifest, uploaded
from device_agent.formats.protocol.fleet import FederatedEvaluation
from device_agent.formats.update import MOST_SAMPLES, UpdateRecord
from device_agent.privacy.factor_products import summed_table, summed_tensors
from device_agent.privacy.secret_sum import SecretSum
from device_agent.privacy.summed_updates import GroupMean, elements, group_mean
from profiles.errors import UpdateError
from profiles.text_formatting import counted
from toolkit.aggregation.update_validation import is_variance
from toolkit.coordinator.closing.private_rounds import Opening, PrivateAggregation
from toolkit.coordinator.closing.round_aggregation import RoundAggregation
from toolkit.coordinator.closing.round_models import Model, PrivateModel, Samples
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.rounds.device_evaluation import DeviceCounts, federated_evaluation
from toolkit.coordinator.rounds.upload_validation import Update

TICK_S = 0.5
"""How often the deadlines of steps are checked, in seconds."""


class GroupUpdate(NamedTuple):
    """The mean update of a group. It counts like one update with the samples of all its devices.

    Attributes:
        devices: The devices of the group.
        update: The record and the tensors of the mean. If the devices add noise, the sum of their
            changes takes the place of the tensors.
        mean: The figures of the sum.
    """

    devices: list[str]
    update: Update
    mean: GroupMean


class ClosedSums(NamedTuple):
    """The result of the secure sums of a round.

    Attributes:
        groups: The groups that have a sum, by submodel.
        failed: Maps a submodel without a sum to the reason.
        lost: Maps a device that is in no sum to the reason.
    """

    groups: dict[str, GroupUpdate]
    failed: dict[str, str]
    lost: dict[str, str]

    def devices(self, left_out: Collection[str]) -> list[str]:
        """The devices in the sums, without the groups of the submodels in `left_out`."""
        inside = [group for name, group in self.groups.items() if name not in left_out]
        return sorted(device for group in inside for device in group.devices)

    def texts(self) -> Iterator[str]:
        """Yield a line for each sum, and a line for each submodel without a sum."""
        for submodel, (devices, (record, _), mean) in self.groups.items():
            text = f"secure sum of {submodel}: {counted(len(devices), 'device')}"
            if mean.steps:  # with differential privacy, devices add no losses and steps
                text += f", mean loss {record.losses(4)}"
            yield text + (f", {mean.clipped} numbers clipped" if mean.clipped else "")
        for submodel, why in self.failed.items():
            yield f"no secure sum of {submodel}: {why.removesuffix('.')}"


def close_sums(coordinator: Coordinator, stopping: threading.Event) -> ClosedSums | None:
    """Let the devices of the closed round go through the steps of their sums.

    Returns None if the program ends before the sums are complete.
    """
    sums, rounds = coordinator.sums, coordinator.rounds
    assert sums is not None
    with coordinator.lock:
        devices = rounds.updates.keys() & rounds.present
        sign = coordinator.key.group_signature
        sums.begin(rounds.round, devices, coordinator.clock(), sign)
    while not stopping.is_set():
        with coordinator.lock:
            now, absent = coordinator.clock(), set(rounds.updates) - rounds.present
            if sums.advance(now, rounds.deadline_s, absent):
                break
        coordinator.changed.wait(TICK_S)
        coordinator.changed.clear()
    return None if stopping.is_set() else _added_up(coordinator)


def _added_up(coordinator: Coordinator) -> ClosedSums:
    """The results of the completed sums, for which devices send nothing more."""
    sums = coordinator.sums
    assert sums is not None
    closed = ClosedSums({}, dict(sums.too_small), {})
    for submodel, running in sums.running.items():
        own = running.sum
        closed.lost.update(
            {d: f"it did not answer the step {step!r} of its secure sum" for d, step in
             own.lost.items() if d not in own.present}
        )  # fmt: skip
        if running.failure is not None:
            closed.failed[submodel] = running.failure
            continue
        try:
            closed.groups[submodel] = _group_update(coordinator, submodel, own)
        except UpdateError as error:
            closed.failed[submodel] = str(error)
    for submodel, why in closed.failed.items():
        closed.lost.update(dict.fromkeys(sums.devices_of(submodel), why))
    return closed


def _group_update(coordinator: Coordinator, submodel: str, own: SecretSum) -> GroupUpdate:
    """The mean update of a group whose shares have come. Raises UpdateError if it is unusable."""
    store, terms = coordinator.store, coordinator.secure_terms
    assert terms is not None
    bundle = coordinator.bundles[submodel]
    about = store.blobs.path(bundle[MANIFEST].sha256).read_bytes()
    manifest = msgspec.json.decode(about, type=Manifest)
    table = uploaded(manifest.tensors)

    def vectors() -> Iterator[np.ndarray]:
        for device in own.present:
            data = store.blobs.read(store.upload(device) or "")
            if data is None or len(data) != 4 * elements(table):
                raise UpdateError(
                    "The masked update of {device} is missing or damaged in the state folder.",
                    code="update.damaged-input",
                    device=device,
                )
            yield np.frombuffer(data, "<u4").astype(np.uint32, copy=False)

    total = own.total(vectors())
    mean = group_mean(total, table, terms, len(own.group.members), len(own.present))
    if terms.privacy is None:
        received = load_file(store.blobs.path(bundle[WEIGHTS].sha256))
        tensors = mean_tensors(mean, manifest, received)
    else:
        times = len(own.present)
        tensors = {n: (times * change).astype(np.float32) for n, change in mean.changes.items()}
    update = group_record(mean, manifest, fingerprint(about).sha256), tensors
    assert coordinator.check_update is not None
    coordinator.check_update(update, f"the secure sum of {submodel}")
    return GroupUpdate(own.present, update, mean)


def mean_tensors(
    mean: GroupMean, manifest: Manifest, received: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The mean of the tensors of a group; low-rank factors are replaced by their products.

    Args:
        mean: The figures of the sum.
        manifest: The manifest of the bundle that the devices trained.
        received: The tensors that the devices received.
    """
    sent, tensors = uploaded(manifest.tensors), {}
    for entry, before in zip(summed_table(sent), summed_tensors(received, sent), strict=True):
        value = before + mean.changes[entry.name]
        if is_variance(entry.stands_for or entry.name):
            value = np.maximum(value, 0)  # rounding may have made a variance of zero negative
        tensors[entry.name] = value.astype(entry.dtype)
    return tensors


def group_record(mean: GroupMean, manifest: Manifest, bundle: str) -> UpdateRecord:
    """The record of the update of a group, with the samples of all its devices.

    `bundle` is the SHA-256 of the `manifest` of the bundle that the devices trained.
    """
    return UpdateRecord(
        bundle=bundle,
        base=manifest.base,
        submodel=manifest.submodel,
        samples=mean.samples,
        steps=round(mean.steps),
        loss_first=mean.loss_first,
        loss_last=mean.loss_last,
        tensors=summed_table(uploaded(manifest.tensors)),
        file=fingerprint(b""),
    )


def summed_evaluation(round_: int, groups: Mapping[str, GroupUpdate]) -> FederatedEvaluation | None:
    """How the devices of `groups` judge the model that they received in round `round_`.

    There are pooled figures only: nobody knows the figures of one device. `kinds` has submodels as
    keys. Returns None if no device has evaluated the model.
    """
    known = {
        submodel: DeviceCounts(submodel, group.mean.before, group.mean.after)
        for submodel, group in groups.items()
        if group.mean.before is not None
    }
    pooled = federated_evaluation(round_, list(known.values()))
    if pooled is None:
        return None
    devices = {submodel: groups[submodel].mean.evaluating for submodel in known}
    return replace(
        pooled,
        devices=sum(devices.values()),
        mean_accuracy=None,
        mean_loss=None,
        worst_accuracy=None,
        worst_loss=None,
        kinds={s: replace(own, devices=devices[s]) for s, own in pooled.kinds.items()},
    )


class _OfGroups(RoundAggregation):
    """Aggregates the updates of groups. It leaves out whole groups only.

    `left_out` has submodels as keys.
    """

    _groups: dict[str, GroupUpdate]

    def run(self) -> int:
        """Aggregate the groups. Returns the number of devices in groups that were not left out."""
        super().run()
        return sum(len(g.devices) for name, g in self._groups.items() if name not in self.left_out)

    def _senders(self) -> list[str]:
        return sorted(self._groups)

    def _updates(self, devices: Set[str]) -> Iterator[tuple[str, Update]]:
        for name in self._senders():
            if name in devices and name not in self.left_out:
                yield name, self._groups[name].update


class SumAggregation(_OfGroups):
    """Aggregates the mean updates of groups."""

    def __init__(
        self,
        model: Model,
        coordinator: Coordinator,
        held_out: Samples | None,
        round_: int,
        groups: dict[str, GroupUpdate],
    ) -> None:
        super().__init__(model, coordinator.store, held_out, round_)
        self._groups = groups

    def _bound(self, devices: Sequence[str]) -> None:
        super()._bound(devices)
        self._most_samples = MOST_SAMPLES  # groups differ in their number of devices


class NoisedSumAggregation(_OfGroups, PrivateAggregation):
    """Aggregates the sums of groups, whose devices have clipped their changes and added noise."""

    def __init__(
        self,
        model: Model,
        coordinator: Coordinator,
        held_out: Samples | None,
        opening: Opening,
        groups: dict[str, GroupUpdate],
    ) -> None:
        super().__init__(model, coordinator.store, held_out, opening)
        self._groups = groups

    def _add_up(self, model: PrivateModel, updates: Iterable[Update]) -> None:
        model.fold_changes(updates, self._opening.devices, self._round)
