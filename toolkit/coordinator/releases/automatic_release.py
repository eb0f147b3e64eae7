"""Which model the coordinator releases by itself, and when: the table [release]."""

from collections.abc import Sequence

from device_agent.formats.protocol.fleet import RoundResult
from toolkit.coordinator.federation_config import ReleaseTable
from toolkit.coordinator.rounds.compared_rounds import best_of, compared, is_better
from toolkit.coordinator.storage.release_folder import Release


def round_to_release(
    table: ReleaseTable,
    done: int,
    current: int,
    history: Sequence[RoundResult],
    releases: Sequence[Release],
) -> int | None:
    """The round whose model should be released now; None if there is none.

    It depends only on what is stored, so that a restart neither forgets nor repeats a release. A
    model that the operator has withdrawn is not released again.

    Args:
        table: The table [release].
        done: How many rounds are over.
        current: The round whose model is the global one.
        history: The results of all rounds.
        releases: All releases.
    """
    if table.interval is None or done == 0 or done % table.interval:
        return None
    released = {release.round for release in releases}
    if table.when is None:
        return None if current in released else current
    figures = [(result.round, figure) for result, figure in compared(history) if result.round]
    if not figures:
        return None
    best, known = best_of(figures), dict(figures)
    better = all(is_better(known[best], known[round_]) for round_ in released & known.keys())
    return best if better else None
