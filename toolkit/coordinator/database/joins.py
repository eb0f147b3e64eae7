"""Limits joins: a token has a lifetime and places, and each request is valid only once."""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime

from profiles.text_formatting import counted
from toolkit.coordinator.database.database import Database
from toolkit.coordinator.refusals import forbidden

_PREFIX = "join:"
"""The prefix of the hash of the signed text in the keys of the table `meta`."""


@dataclass(frozen=True)
class Token:
    """A join token of a federation for `count` devices of `kind`; None means any number.

    `expires` is in seconds since 1970. A token that an operator has made has a `number`. At most
    `most` devices may join with it, and `joined` devices have joined.
    """

    kind: str
    count: int | None
    expires: float
    number: int | None = None
    most: int | None = None
    joined: int = 0

    def free(self, taken: int) -> int | None:
        """How many more devices may join if `taken` places of the kind are taken; None: any."""
        left = [self.count and self.count - taken, self.most and self.most - self.joined]
        return min((n for n in left if n is not None), default=None)

    def check_age(self, now: float) -> None:
        """Raise RefusalError (403) if the token has expired by `now`."""
        if now > self.expires:
            raise forbidden(
                "This join token expired on {date}. Ask the operator for another one: `edgetailor "
                "make-token {kind}` makes it.",
                code="join.expired-token",
                kind=self.kind,
                date=f"{datetime.fromtimestamp(self.expires, UTC):%Y-%m-%d}",
            )

    def check_free(self, used: int) -> None:
        """Raise RefusalError (403) if `used` devices have taken all places of the kind.

        Also raise it if `most` devices have joined with this token.
        """
        if self.most is not None and self.joined >= self.most:
            raise forbidden(
                "This join token is used up: it was for {counted}. Ask the operator for another "
                "one.",
                code="join.used-up-token",
                kind=self.kind,
                devices=self.most,
                counted=counted(self.most, "device"),
            )
        if self.count is not None and used >= self.count:
            raise forbidden(
                "This join token is used up: it is for {counted} of kind {kind!r}. Use the token "
                "of another kind, or ask the operator for a higher `count`.",
                code="join.used-up-token",
                kind=self.kind,
                devices=self.count,
                counted=counted(self.count, "device"),
            )


class UsedJoins:
    """Remembers signed join requests until their time stamps are too old to be accepted.

    So a copied request is refused, and the person who copied it does not get the device's secret.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def take(self, signed: bytes, now: float, valid_s: float) -> bool:
        """Record the text `signed` of a join. Returns whether it is new.

        Texts that were recorded more than `valid_s` seconds before `now` are forgotten.
        """
        key = _PREFIX + hashlib.sha256(signed).hexdigest()
        with self._database.transaction() as db:
            db.execute(
                "DELETE FROM meta WHERE key LIKE ? AND CAST(value AS REAL) < ?",
                (f"{_PREFIX}%", now - valid_s),
            )
            row = db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, str(now)))
            return row.rowcount == 1
