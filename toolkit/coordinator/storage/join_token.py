"""A join token: how long it admits devices, and how many."""

from dataclasses import dataclass
from datetime import UTC, datetime

from profiles.text_formatting import counted
from toolkit.coordinator.refusals import forbidden


@dataclass(frozen=True)
class Token:
    """A join token for `count` devices of `kind`, or any number; `expires`: seconds since 1970."""

    kind: str
    count: int | None
    expires: float

    def check_age(self, now: float) -> None:
        """Raise RefusalError (403) if the token has expired by `now`."""
        if now > self.expires:
            raise forbidden(
                "This join token expired on {date}. To make a new one, the operator removes "
                "tokens/{kind}.token from the coordinator's state folder and starts `edgetailor "
                "serve` again.",
                code="join.expired-token",
                kind=self.kind,
                date=f"{datetime.fromtimestamp(self.expires, UTC):%Y-%m-%d}",
            )

    def check_free(self, used: int) -> None:
        """Raise RefusalError (403) if `used` devices leave no place."""
        if self.count is not None and used >= self.count:
            raise forbidden(
                "This join token is used up: it is for {counted} of kind {kind!r}. Use the token "
                "of another kind, or start a federation with more.",
                code="join.used-up-token",
                kind=self.kind,
                devices=self.count,
                counted=counted(self.count, "device"),
            )
