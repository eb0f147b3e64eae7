"""Receives the updates of the open round: first the tensors, in pieces, then the record."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from msgspec import UnsetType

from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.evaluation_counts import Judgement
from device_agent.formats.input_summary import far_off
from device_agent.formats.manifest import Manifest, encode
from device_agent.formats.protocol.problems import OTHER_BUNDLE, ROUND_CLOSED
from device_agent.formats.protocol.rounds import Receipt
from device_agent.formats.protocol.transfers import Upload
from device_agent.formats.update import UpdateRecord
from profiles.errors import UpdateError
from toolkit.coordinator.database.device_registry import Device, hashed, label
from toolkit.coordinator.refusals import RefusalError, conflict, unusable_because
from toolkit.coordinator.requests.secure_sums import SecureSums
from toolkit.coordinator.rounds import upload_validation
from toolkit.coordinator.rounds.count_validation import check_evaluation
from toolkit.coordinator.storage.incoming_files import IncomingFile

logger = logging.getLogger(__name__)

REFUSED = "{more} updates were not taken; `status` names the devices."


class Uploads(SecureSums):
    """Receives what devices send for the open round."""

    def upload(self, device: Device, round_: int, sha256: str) -> Upload:
        """How many bytes of the tensors with this hash have come.

        Ends a request that still sends these tensors.

        Raises RefusalError (409) if the round takes no update from this device.
        """
        self._check_round(device, round_)
        # The file is read, because a file that the disk damaged has to be sent again.
        complete = self.store.upload(device.id) == sha256 and self.store.blobs.is_whole(sha256)
        received = 0 if complete else self.store.incoming.received(device.id, sha256)
        return Upload(received=received, complete=complete)

    def open_upload(self, device: Device, round_: int, sha256: str, offset: int) -> IncomingFile:
        """Open the file that takes the tensors of `device` after their first `offset` bytes.

        The file cannot become larger than an update for the device's bundle. Raises RefusalError
        (409) if the round takes no update from this device, or if the number of received bytes is
        not `offset`.
        """
        with self.lock, self._noting_refusals(device, round_):
            self._check_upload(device, round_)
            manifest = self._manifest(device)
        limit = upload_validation.size_limit(manifest)
        return self.store.incoming.open(device.id, sha256, offset, limit)

    def keep_upload(self, device: Device, round_: int, received: IncomingFile) -> None:
        """Keep the received tensors until their update.json comes.

        Raises RefusalError (409) if the tensors were altered, or if the round has closed.
        """
        self._check_round(device, round_)
        self.store.keep_upload(device.id, received)

    def _check_round(self, device: Device, round_: int) -> None:
        with self.lock, self._noting_refusals(device, round_):
            self._check_upload(device, round_)

    def _check_upload(self, device: Device, round_: int) -> None:
        """Raise RefusalError (409) unless `device` may send tensors now. The caller locks."""
        if self.sums is None:
            self.rounds.check_round(device.id, round_)
        else:
            self.check_masked_upload(device, round_)

    @contextmanager
    def _noting_refusals(self, device: Device, round_: int) -> Iterator[None]:
        """Tell the operator if asynchronous rounds take no update of `round_` from `device`.

        Synchronous rounds tell it when they close. The caller holds the lock.
        """
        try:
            yield
        except RefusalError as refusal:
            if refusal.code == ROUND_CLOSED and self.rounds.max_staleness is not None:
                why = f"its update of round {round_} was not taken: {refusal.values['reason']}"
                self.activity[device.id].missed = why
                if self.minute_log.begins(f"{device.id} {round_}", REFUSED):
                    logger.warning("%s: %s.", label(device), why)
            raise

    def take_update(self, device: Device, round_: int, body: bytes) -> Receipt:
        """Take the update that `body` (its update.json) describes. A device may repeat this.

        Raises:
            RefusalError: 409 for another round, another bundle, a second update or tensors that
                were not sent. 422 for an update that cannot be used.
        """
        assert self.check_update is not None
        if self.sums is not None:
            raise self._without(device, round_)
        record = upload_validation.read_record(body)
        digest = hashed(encode(record).decode())
        with self.lock, self._noting_refusals(device, round_):
            new = self.rounds.check(device.id, round_, record.bundle, digest)
            manifest = self._manifest(device)
        if new:
            with self.store.checking(device.id) as sent:
                # The lock is not held while the whole file is read, so `check` is repeated below.
                upload_validation.check_upload(
                    device.id,
                    record,
                    manifest,
                    sent,
                    self.store.blobs,
                    self.check_update,
                    self.config.evaluation.request,
                )
                with self.lock, self._noting_refusals(device, round_):
                    self.rounds.check(device.id, round_, record.bundle, digest)
                    self.store.add_update(self.rounds.round, device.id, record)
                    self.rounds.take(device.id, round_, record.bundle, digest)
                    activity = self.activity[device.id]
                    activity.loss, activity.missed = record.loss_last, None
                    activity.told = None
                    self._compare_inputs(device, record)
            self.changed.set()
        return Receipt(round=round_)

    def take_judgement(self, device: Device, round_: int, judgement: Judgement) -> Receipt:
        """Take the counts by which `device` judges the last or the new model. May be repeated.

        Raises:
            RefusalError: 409 for another round or bundle, or a device that is not asked. 422 for
                counts that cannot be used.
        """
        with self.lock:
            candidate = self.candidate
            if candidate is None:
                asked = self.store.final_evaluation.is_asked(device.id)
            else:
                asked = device.id in candidate.before
            asked = asked and round_ == self.rounds.round
            if asked and candidate is None and not self.activity[device.id].judges_last:
                return Receipt(round=round_)  # a late vote about the same model, now the last one
            if not asked or (candidate is None and not self.rounds.is_judging):
                raise conflict(
                    "{device} is not asked to judge the model of round {round} now.",
                    code=ROUND_CLOSED,
                    device=device.id,
                    round=round_,
                )
            manifest = self._manifest(device)
            if judgement.bundle != fingerprint(manifest).sha256:
                raise conflict(
                    "{device} has judged a bundle that was not offered to it. Fetch the bundle "
                    "again.",
                    code=OTHER_BUNDLE,
                    device=device.id,
                )
        about = msgspec.json.decode(manifest, type=Manifest)
        try:
            check_evaluation([judgement.counts], about, self.config.evaluation.request, device.id)
        except UpdateError as error:
            raise unusable_because(error) from None
        with self.lock:
            if candidate is None:
                self.store.final_evaluation.answer(device.id, judgement.counts)
            else:
                candidate.answers.setdefault(device.id, judgement.counts)
            # A late vote is about another model than the one that is judged now.
            phase = "judging" if candidate is None else "aggregating"
            if self.candidate is candidate and self.rounds.phase == phase:
                self.rounds.judges.discard(device.id)
        self.changed.set()
        return Receipt(round=round_)

    def _compare_inputs(self, device: Device, record: UpdateRecord) -> None:
        """Record how the inputs of `device` differ from the coordinator's samples.

        The caller holds the lock.
        """
        differences = None
        if self.inputs is not None and not isinstance(record.inputs, UnsetType):
            differences = far_off(record.inputs, self.inputs)
        activity = self.activity[device.id]
        before, activity.inputs = (
            activity.inputs,
            (differences and f"its inputs differ much from `held_out`: {differences}"),
        )
        if activity.inputs not in (None, before):
            logger.warning("%s: %s. Check the unit of its sensor.", label(device), activity.inputs)
