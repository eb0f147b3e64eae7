"""The figures of a simulated round that are logged to TensorBoard or MLflow."""

from collections.abc import Callable

import msgspec

from toolkit.metric_logs import Log, Logged, quality_figures
from toolkit.simulation.results import RoundResult

Observer = Callable[[RoundResult], None]
"""Called with each finished round."""
COUNTED = ("hostile", "left_out", "limited", "paused")
"""Keys of `history.jsonl` with clients. Only the number of these clients is logged."""


def logged(result: RoundResult) -> Logged:
    """The figures of a round that are not None, with the keys of `history.jsonl`.

    The logged figures of `privacy` are `epsilon` and `clip`.
    """
    figures = msgspec.structs.asdict(result)
    del figures["round"], figures["devices"], figures["held_out"], figures["privacy"]
    if result.privacy is not None:
        figures |= {"epsilon": result.privacy.epsilon, "clip": result.privacy.clip}
    for key in COUNTED:
        figures[key] = None if figures[key] is None else len(figures[key])
    figures |= quality_figures(result.held_out, result.devices)
    known = {key: float(value) for key, value in figures.items() if value is not None}
    return Logged(result.round, known)


def observer(log: Log) -> Observer:
    """A function that logs each finished round to `log`."""
    return lambda result: log(logged(result))
