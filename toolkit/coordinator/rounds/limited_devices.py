"""Which devices' updates were limited, and how often."""

from collections import Counter
from collections.abc import Mapping, Sequence

from device_agent.formats.protocol.fleet import RoundResult
from profiles.text_formatting import counted

FEWEST = 3
"""A device that was limited in fewer rounds is not named."""
MOST_NAMED = 5
"""The most devices that a sentence names."""


def times_limited(history: Sequence[RoundResult]) -> Counter[str]:
    """In how many rounds each device was limited."""
    return Counter(device for result in history for device in result.limited)


def limited_note(
    device: str, history: Sequence[RoundResult], times: Mapping[str, int], trained: int
) -> str | None:
    """A note about the limited updates of `device`. `trained` counts all updates that it has sent.

    None if the last round did not limit the device, and the device was not limited often.
    """
    last = next((r for r in reversed(history) if device in r.limited), None)
    if last is None or (last is not history[-1] and not often_limited(times[device], trained)):
        return None
    often = f"limited in {times[device]} of its {counted(trained, 'round')}"
    return f"{often}; in round {last.round}, {last.limited[device].text()}"


def often_limited(times: int, trained: int) -> bool:
    """Whether a device was limited in most of the rounds that it has trained."""
    return times >= FEWEST and 2 * times > trained


def limits_warning(times: Mapping[str, int], trained: Mapping[str, int]) -> str | None:
    """A sentence about the devices that were limited in most of their rounds, or None."""
    often = sorted(
        (device for device, count in times.items() if often_limited(count, trained.get(device, 0))),
        key=lambda device: (-times[device], device),
    )
    if not often:
        return None
    named = [f"{d} ({times[d]} of {trained[d]})" for d in often[:MOST_NAMED]]
    more = f" and {counted(len(often) - MOST_NAMED, 'more device')}" if often[MOST_NAMED:] else ""
    return (
        f"Updates were limited in most rounds of {', '.join(named)}{more}. Their data differ much "
        "from those of the others, or they harm the model: pause devices that you do not trust."
    )


def limits_text(result: RoundResult) -> str | None:
    """A sentence about the limited updates of a round; None if no update was limited."""
    if not result.limited:
        return None
    worst = sorted(result.limited, key=lambda device: -result.limited[device].times)[:MOST_NAMED]
    named = "; ".join(f"{device}: {result.limited[device].text()}" for device in worst)
    share = f"{len(result.limited)} of {counted(result.updates, 'update')}"
    which = "" if len(worst) == len(result.limited) else "the most "
    return f"limited {share} ({which}{named})"
