"""Decides when the coordinator itself releases a model, or offers a release to all devices."""

import logging
from collections.abc import Callable, Collection, Sequence

from device_agent.formats.protocol.fleet import RoundResult
from device_agent.system.process_memory import ran_out
from profiles.errors import EdgeTailorError, InputError
from toolkit.coordinator.federation_file.small_tables import ReleaseTable
from toolkit.coordinator.releases.offered_releases import OfferedReleases
from toolkit.coordinator.releases.release_changes import finish_rollout
from toolkit.coordinator.rounds.compared_rounds import best_of, compared, is_better
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.release_folder import Release, ReleaseFolder

logger = logging.getLogger(__name__)
MakeRelease = Callable[[int], Release]
"""Makes a release of the model of a round."""


def release_if_due(
    store: Store, table: ReleaseTable, done: int, make: MakeRelease
) -> Release | None:
    """Make and return the release that is due after round `done`, if any.

    An error is only logged.
    """
    current = store.history.current_round()
    assert current is not None
    try:
        releases = ReleaseFolder(store.folder).read()
        history, kept = store.history.results(), store.history.kept_rounds()
        round_ = round_to_release(table, done, current, history, releases, kept)
        if round_ is None:
            return None
        release = make(round_)
    except Exception as error:
        # A release takes more memory than a round, which may go on without it.
        if not isinstance(error, EdgeTailorError | OSError) and ran_out(error) is None:
            raise
        reason = str(error) or "memory ran out"
        logger.warning("No release was made after round %d: %s", done, reason)
        return None
    text = "Release %d, the model after round %d, is offered to all devices."
    logger.info(text, release.number, round_)
    return release


def round_to_release(
    table: ReleaseTable,
    done: int,
    current: int,
    history: Sequence[RoundResult],
    releases: Sequence[Release],
    kept: Collection[int],
) -> int | None:
    """The round whose model should be released now; None if there is none.

    The result depends only on what is stored, so that a restart neither forgets nor repeats a
    release. A model that the operator has withdrawn is not released again.

    Args:
        table: The table [release].
        done: How many rounds are over.
        current: The round whose model is the current global model.
        history: The results of all rounds.
        releases: All releases.
        kept: The rounds whose models are kept. If the initial model is better than all later
            models, possibly the best later model is not kept.
    """
    if table.interval is None or done == 0 or done % table.interval:
        return None
    released = {release.round for release in releases}
    if table.when is None:
        return None if current in released else current
    known = {result.round: figure for result, figure in compared(history)}
    figures = [(round_, figure) for round_, figure in known.items() if round_ and round_ in kept]
    if not figures:
        return None
    best = best_of(figures)
    better = all(is_better(known[best], known[round_]) for round_ in released & known.keys())
    return best if better else None


def release_to_all_if_taken(store: Store, released: OfferedReleases) -> None:
    """Offer the newest release to all devices if its share has taken it and `then_all` is set.

    Devices of the share that have left do not count. At least one device must have reported.
    """
    newest = released.newest
    if newest is None or newest.devices is None or not newest.then_all:
        return
    members = {device.id for device in store.registry.members()}
    reports = [store.release_reports.of(device) for device in newest.devices]
    answers = [
        report
        for device, report in zip(newest.devices, reports, strict=True)
        if device in members or report is not None
    ]
    taken = [a is not None and a.number == newest.number and a.taken for a in answers]
    if not taken or not all(taken):
        return
    try:
        finished = finish_rollout(store.folder, newest.number)
    except BlockingIOError:  # `edgetailor release` is changing releases at this moment
        return
    except (InputError, OSError) as error:
        released.tell(error)
        return
    if finished:
        logger.info(
            "Release %d was taken by its share of the devices (%d): all get it now.",
            newest.number,
            len(taken),
        )
