"""Aggregates the updates of one round into the global model, and leaves out unusable updates.

To fold an update means to aggregate it into the model.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from msgspec.structs import replace
from safetensors import SafetensorError

from device_agent.formats.protocol.fleet import Limited
from device_agent.formats.tensor_files import tensors_in
from device_agent.formats.update import MOST_SAMPLES, UpdateRecord
from profiles.errors import EdgeTailorError, UpdateError
from profiles.json_decoding import MalformedError, decode_json
from toolkit.aggregation.committee import DISAGREES
from toolkit.aggregation.influence import influences, mean_gradient
from toolkit.aggregation.limits.reference import RoundLimits
from toolkit.aggregation.limits.update_bounds import (
    LIMIT,
    SUSPICIOUS,
    Excess,
    Scales,
    excesses,
    most_samples,
)
from toolkit.aggregation.model_judge import (
    counted_samples,
    judge_updates,
    judged_text,
    suspects,
    with_part,
)
from toolkit.aggregation.stale_updates import staleness_weight
from toolkit.coordinator.closing.round_models import (
    CarryingModel,
    ComparingModel,
    JudgedModel,
    Model,
    Samples,
    VersionedModel,
)
from toolkit.coordinator.database.suspicions import Suspect
from toolkit.coordinator.rounds.upload_validation import Update, is_finite
from toolkit.coordinator.storage.coordinator_store import Store

if TYPE_CHECKING:
    from toolkit.evaluation_sums import Evaluation

logger = logging.getLogger(__name__)

LOST_VERSION = "the model that it was trained from is not kept any more"
DAMAGED = "its tensors are missing or damaged in the coordinator's state folder"


def current_state(store: Store, model: Model) -> bytes:
    """The state that the next round starts from, as `model.load` takes it.

    After a change of `model`, the state of the earlier model is carried over.
    """
    data, round_ = store.model(), store.history.current_round()
    assert data is not None
    assert round_ is not None
    if store.settings.model_changed_after(round_):
        assert isinstance(model, CarryingModel)
        data, _ = model.carried(data)
    return data


class RoundAggregation:
    """Aggregates the updates of `round_` into `model`. Each update was checked when it arrived.

    An update is left out if it is damaged or far beyond its bounds. An update is also left out if
    the aggregated model cannot predict or train with this update. If every update is left out, the
    model stays as it was. If `bounded`, the other updates are limited; see
    `toolkit/aggregation/limits/update_limits.py`. If `judged`, updates that make the new model
    worse are left out; see `toolkit/aggregation/model_judge.py`.

    Attributes:
        left_out: Maps a device to the reason why its update was left out.
        limited: Maps a device to what the limits changed in its update.
        reference: The reference for the limits of the next round; None without limits.
        excess: Maps a device to the excess of its update over the reference numbers.
        staleness: In asynchronous rounds, maps a device to the staleness of its update.
        quality: The quality of the new model on `held_out`. None without samples; then a model is
            usable if its weights are finite.
    """

    def __init__(
        self,
        model: Model,
        store: Store,
        held_out: Samples | None,
        round_: int,
        asynchronous: bool = False,
        bounded: bool = False,
        judged: bool = False,
    ) -> None:
        self.limited: dict[str, Limited] = {}
        self.reference = store.reference() if bounded else None
        self._limits: RoundLimits | None = None
        self._judged = judged
        self.left_out: dict[str, str] = {}
        self.excess: dict[str, Excess] = {}
        self.quality: Evaluation | None = None
        self._model, self._store, self._held_out = model, store, held_out
        if isinstance(model, ComparingModel):
            model.held_out = held_out
        self._round, self._must_train = round_, True
        self._most_samples = MOST_SAMPLES
        self.staleness: dict[str, int] = {}
        self._models: dict[int, str] = {}
        self._weakened: set[str] = set()
        self._parts: dict[str, tuple[int, int]] = {}
        if asynchronous:
            self._find_versions()

    def run(self) -> int:
        """Aggregate the updates. Returns how many of them were not left out."""
        devices = self._senders()
        self._bound(devices)
        try:
            self._fold(devices)
        except EdgeTailorError:
            self._fold_sound([device for device in devices if device not in self.left_out])
        self._judge([device for device in devices if device not in self.left_out])
        if self._limits is not None:
            self.reference = self._limits.reference.after(self._limits.figures)
        return self.inside

    def without_disagreeing(self, reason: str) -> bool:
        """Aggregate again without the updates that point against most others.

        These updates are left out because of the votes in `reason`. Returns False if there are no
        such updates, or if no model can be made without them.
        """
        model = self._model
        if not isinstance(model, ComparingModel):
            return False
        devices = {device for device in self._senders() if device not in self.left_out}
        order: list[str] = []
        if self._limits is not None:
            self.reference = self._limits.reference
        try:
            self._restore_model()
            out = {order[n] for n in model.disagreeing(self._in_order(devices, order))}
            if not out:
                return False
            self._restore_model()
            self._fold(devices - out)
        except EdgeTailorError:
            return False
        self.left_out |= dict.fromkeys(sorted(out), f"{DISAGREES} {reason}")
        text = "Round %d: left out the updates that point against the others, of %s."
        logger.warning(text, self._round, ", ".join(sorted(out)))
        if self._limits is not None:
            self.reference = self._limits.reference.after(self._limits.figures)
        return True

    def _in_order(self, devices: Set[str], order: list[str]) -> Iterator[Update]:
        """Yield the updates of `devices`, and add their devices to `order`."""
        for device, update in self._updates(devices):
            order.append(device)
            yield update
            del update  # otherwise two updates are in memory while the next one is read

    def reject(self, reason: str) -> int:
        """Leave out all updates for `reason`, so that the model stays as it was. Returns 0."""
        self.left_out |= {d: reason for d in self._senders() if d not in self.left_out}
        self.limited, self.reference = {}, None
        self._restore_model()
        if self._held_out is not None:
            self.quality = self._model.evaluation(*self._held_out)
        return 0

    def _senders(self) -> list[str]:
        """The devices whose updates have come."""
        return [device for device, _, _ in self._store.updates(self._round)]

    @property
    def inside(self) -> int:
        """How many updates are not left out."""
        return len(self._senders()) - len(self.left_out)

    @property
    def suspect(self) -> Suspect | None:
        """The aggregated update with the largest excess, if this excess is above SUSPICIOUS."""
        inside = {d: excess for d, excess in self.excess.items() if d not in self.left_out}
        device = max(inside, key=lambda device: inside[device].times, default=None)
        if device is None or inside[device].times <= SUSPICIOUS:
            return None
        return Suspect(round=self._round, device=device, reason=str(inside[device]))

    def _bound(self, devices: Sequence[str]) -> None:
        """Leave out updates that are far beyond their bounds."""
        scales: dict[str, Scales] = {}
        samples, unknown = [], {}
        for device, update in self._updates(set(devices)):
            scales[device] = self._model.scales(update)
            samples.append(update[0].samples)
            if self._is_unknown(device, update[0].submodel):
                unknown[device] = self._model.figures(update)
            del update  # otherwise two updates are in memory while the next one is read
        self.excess = excesses(scales)
        for device, excess in self.excess.items():
            if excess.times > LIMIT:
                limit = LIMIT * excess.room
                self.left_out[device] = f"{excess}. The limit is {limit:g} times that number."
        if samples:
            self._most_samples = most_samples(samples)
        if self.reference is not None:
            inside = [own for device, own in unknown.items() if device not in self.left_out]
            self.reference = self.reference.completed(inside)

    def _is_unknown(self, device: str, submodel: str) -> bool:
        """Whether the limits of an update need the figures of this round's updates."""
        if self.reference is None or self.staleness.get(device):
            return False
        return submodel not in self.reference.kinds

    def _judge(self, devices: Sequence[str]) -> None:
        """Leave out the updates of `devices` without which the model is better.

        The model contains all of these updates.
        """
        whole = self.quality
        if not self._judged or whole is None or whole.groups is None:
            return
        assert self._held_out is not None
        new = self._model.save()
        suspected = suspects(self._influences(devices))
        if not suspected:
            self._model.load(new)
            return
        self._restore_model()
        before = self._model.evaluation(*self._held_out)
        text = "Round %d: suspected of raising the loss on the held-out samples: %s."
        logger.info(text, self._round, ", ".join(suspected))

        def fold(out: Collection[str], weakened: Collection[str]) -> None:
            self._restore_model()
            self._weakened = {*weakened}
            self._fold([device for device in devices if device not in out])

        def candidate(out: Set[str], weakened: Set[str]) -> "Evaluation | None":
            try:
                fold(out, weakened)
            except EdgeTailorError:
                return None
            return self.quality

        verdict = judge_updates(suspected, before, whole, candidate)
        fold(*verdict)
        assert self.quality is not None
        for device in verdict.left_out:
            self.left_out[device] = judged_text(self.quality, whole)

    def _influences(self, devices: Sequence[str]) -> Mapping[str, float]:
        """How much each update raises the loss. Restores an earlier model."""
        model = self._model
        assert isinstance(model, JudgedModel)
        assert self._held_out is not None
        after = model.gradient(*self._held_out)
        self._restore_model()
        gradient = mean_gradient(model.gradient(*self._held_out), after)
        found = {}
        for staleness in sorted({self.staleness.get(device, 0) for device in devices}):
            if staleness:
                model.load(self._saved(staleness))
            same = {d for d in devices if self.staleness.get(d, 0) == staleness}
            for device, update in self._updates(same):
                own = model.influence(update, gradient, self.reference)
                found[device] = own.weakened(staleness_weight(staleness))
                del update  # otherwise two updates are in memory while the next one is read
        return influences(found)

    def _fold_sound(self, devices: Sequence[str]) -> None:
        """Fold those updates of `devices` that leave the model usable.

        All numbers of these updates are within the bounds. In the whole model they may still be too
        large, or lead to a division by almost zero, which only folding shows. Updates with a larger
        excess are tried later.
        """
        self._must_train = self._trained_before()
        sound: list[str] = []
        self._add_sound(sorted(devices, key=lambda device: self.excess[device].times), sound)
        self._restore_model()
        self._fold(sound)

    def _add_sound(self, devices: Sequence[str], sound: list[str]) -> None:
        """Add to `sound` the devices whose updates can be folded together; leave the others out.

        The updates of all `devices` together cannot be folded, so each half is tried. Among n
        updates, this finds a single unusable one in about 2 log2 n folds.
        """
        middle = len(devices) // 2
        for half in filter(None, (devices[:middle], devices[middle:])):
            self._restore_model()
            try:
                self._fold([*sound, *half])
                sound += half
            except EdgeTailorError as error:
                if len(half) == 1:
                    self.left_out.setdefault(half[0], str(error))
                else:
                    self._add_sound(half, sound)

    def _trained_before(self) -> bool:
        """Whether the model before this round can train on the held-out samples.

        If it cannot, a failure of the new model says nothing about the updates.
        """
        if self._held_out is None:
            return False
        self._restore_model()
        try:
            self._model.check_training(*self._held_out)
        except UpdateError:
            return False
        return True

    def _fold(self, devices: Iterable[str]) -> None:
        """Fold the updates of `devices` that are not left out. May raise any EdgeTailorError."""
        usable = {device for device in devices if device not in self.left_out}
        if usable:
            self._fold_usable(usable)
        if self._held_out is None:
            self._model.check_weights()
            return
        self.quality = self._model.evaluation(*self._held_out)
        loss = self.quality.loss
        if not usable:
            return
        if not is_finite(loss):
            raise UpdateError(
                "The loss of the global model with this update is {loss}. If this happens to many "
                "devices, lower learning_rate in [training] and start again with another `state` "
                "folder.",
                code="update.diverging-model",
                loss=loss,
            )
        if self._must_train:
            self._model.check_training(*self._held_out)

    def _fold_usable(self, devices: Set[str]) -> None:
        """Fold the updates of `devices`, and note what was limited."""
        limits = None if self.reference is None else RoundLimits(self.reference)
        self.limited, self._parts = {}, {}
        folded = self._fold_within(devices, limits)
        if limits is not None:
            self._limits, pairs = limits, zip(folded, limits.limited, strict=True)
            self.limited = {device: limited for device, limited in pairs if limited is not None}
        for device, part in self._parts.items():
            self.limited[device] = with_part(self.limited.get(device), *part)

    def _fold_within(self, devices: Set[str], limits: RoundLimits | None) -> list[str]:
        """Fold the updates of `devices`. Returns the devices in the order of their updates."""
        order: list[str] = []
        stale = sorted({tau for device in devices if (tau := self.staleness.get(device, 0))})
        if not stale:
            self._model.fold_checked(self._weighable_updates(devices, order), limits)
            return order

        def of(staleness: int) -> Iterator[Update]:
            same = {device for device in devices if self.staleness[device] == staleness}
            return self._weighable_updates(same, order)

        assert isinstance(self._model, VersionedModel)  # the file refuses a site
        # One model at a time is in memory.
        versions = ((tau, self._saved(tau), of(tau)) for tau in stale)
        self._model.fold_versions(of(0), versions, limits)
        return order

    def _saved(self, staleness: int) -> bytes:
        data = self._store.blobs.read(self._models[staleness])
        assert data is not None  # `_find_versions` has read it
        return bytes(data)

    def _find_versions(self) -> None:
        """Find the version that each update was trained from.

        Leave out updates of lost versions.
        """
        models, current = self._store.history.models(), self._store.history.current_round()
        assert current is not None
        ages = {model: self._round - 1 - version for version, model in sorted(models.items())}
        ages[models[current]] = 0
        for device, _, body in self._store.updates(self._round):
            base = decode_json(body, UpdateRecord).base
            if base not in ages or (ages[base] and not self._store.blobs.is_whole(base)):
                self.left_out[device] = LOST_VERSION
            else:
                self.staleness[device] = ages[base]
                self._models[ages[base]] = base

    def _weighable_updates(self, devices: Set[str], order: list[str]) -> Iterator[Update]:
        """Yield the updates of `devices`, and add their devices to `order`.

        Limits the number of samples that each update counts.
        """
        for device, (record, arrays) in self._updates(devices):
            order.append(device)
            if device in self._weakened:
                known = self.reference
                most = self._most_samples if known is None else known.most_samples(record.submodel)
                part = counted_samples(record.samples, most)
                self._parts[device] = record.samples, part
                record = replace(record, samples=part)
            if self.reference is not None:  # these limits have a lower cap, and report it
                yield record, arrays
                continue
            yield replace(record, samples=min(record.samples, self._most_samples)), arrays
            del arrays  # otherwise two updates are in memory while the next one is read

    def _updates(self, devices: Set[str]) -> Iterator[tuple[str, Update]]:
        """Yield the updates of `devices`, one in memory at a time; leave unreadable ones out."""
        for device, sha256, body in self._store.updates(self._round):
            if device not in devices or device in self.left_out:
                continue
            update = self._read(sha256, body)
            if update is None:
                self.left_out[device] = DAMAGED
            else:
                yield device, update
                del update

    def _read(self, sha256: str, body: bytes) -> Update | None:
        """One update; None if its file cannot be read or has another content."""
        data = self._store.blobs.read(sha256)
        if data is None:
            return None
        try:
            return decode_json(body, UpdateRecord), tensors_in(data)
        except (SafetensorError, MalformedError):
            return None

    def _restore_model(self) -> None:
        """Restore the model as it was before this round."""
        self._model.load(current_state(self._store, self._model))
