"""Decides when the coordinator releases a model by itself, and which one: the table [release]."""

import logging
from collections.abc import Callable, Collection, Sequence

from device_agent.formats.protocol.fleet import RoundResult
from device_agent.system.process_memory import ran_out
from profiles.errors import EdgeTailorError
from toolkit.coordinator.federation_file.small_tables import ReleaseTable
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
        kept: The rounds whose models are kept. If the initial model is better than all later ones,
            the best later model may not be kept.
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
