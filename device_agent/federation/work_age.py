"""Checks the age of signed work, so that nobody can make a device train old work again."""

from device_agent.formats.protocol.rounds import Work
from device_agent.system.clock import Clock, time_text
from profiles.errors import TrustError

VALID_S = 24 * 3600
"""How long signed work is valid, and how far a device's clock may be behind the coordinator's."""


def check_age(work: Work, newest: int, clock: Clock) -> int:
    """Check that `work`, whose signature is valid, was signed recently.

    If `work` seems to be from the future, the clock of the device or of the coordinator is wrong.
    Such work is refused if a time service has set the device's clock. Otherwise it is accepted if
    the device's clock is believable (see `Clock`). Then `newest` does not change, because the
    coordinator's clock may be wrong.

    Args:
        work: The work.
        newest: `issued` of the newest work that this device has accepted; 0 if there is none.
        clock: The device's clock.

    Returns:
        The new value of `newest`. The caller stores it.

    Raises:
        TrustError: The work is too old, or the clock is wrong.
    """
    now, sure = clock.now(), clock.synchronised()
    if sure and newest > now + VALID_S:
        newest = 0  # noted while the clocks of both sides were wrong
    ahead = work.issued - now
    if work.issued < newest or ahead < -VALID_S:
        raise TrustError(
            "The work of round {round} is too old: it was signed at {signed}. Somebody may have "
            "sent an old message again. Nothing was trained. This device's clock says {clock}, and "
            "its newest work was signed at {known}. Check the clocks of this device and of the "
            "coordinator.",
            code="trust.old-work",
            round=work.round,
            issued=work.issued,
            newest=newest,
            signed=time_text(work.issued),
            clock=time_text(now),
            known=time_text(newest),
        )
    if ahead > VALID_S and (sure or not clock.is_believable(newest)):
        raise TrustError(
            "This device's clock says {clock}, but the work of round {round} was signed at "
            "{signed}. Nothing was trained. Set the clock that is wrong (`timedatectl set-ntp "
            "true`).",
            code="trust.wrong-clock",
            round=work.round,
            issued=work.issued,
            clock=time_text(now),
            signed=time_text(work.issued),
        )
    return newest if ahead > VALID_S else work.issued
