"""Where a coordinator is and what lets a device in there, checked before either is used."""

import urllib3
from urllib3.exceptions import LocationValueError

from profiles.errors import InputError

LABEL, NAME = 63, 253
"""The most characters that a part of a host name may have between two dots, and the whole of it."""
SHOWN = 100
"""The most characters of a URL that an error repeats."""


def check_secret(secret: str) -> str:
    """`secret`, where a header can hold it. Raises InputError otherwise."""
    if not one_word(secret):
        raise InputError(
            "A token is one word of plain characters: give the file that "
            "`edgetailor serve` wrote, unaltered."
        )
    return secret


def one_word(text: str) -> bool:
    """Whether `text` is one word of plain characters."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def check_url(url: str) -> str:
    """`url` without a slash at its end. Raises InputError unless it is http(s)://HOST[:PORT].

    One with a user name or a password is refused too, and not repeated.
    """
    try:
        parsed = urllib3.util.parse_url(url)
    except LocationValueError:
        parsed = urllib3.util.Url()
    fine = parsed.scheme in ("http", "https") and not parsed.query and not parsed.fragment
    fine = fine and _is_host(parsed.host or "") and parsed.port != 0
    if parsed.auth is not None or (not fine and "@" in url):
        raise InputError(
            "A coordinator's URL holds no user name and no password; what came has an @ before "
            "its host. Write it like http://192.168.1.10:8123, as `edgetailor serve` prints it: "
            "the token in --token-file is what lets a device in."
        )
    if not fine:
        shown = url if len(url) <= SHOWN else f"{url[:SHOWN]}..."
        raise InputError(
            f"{shown!r} is no coordinator's URL: write it like http://192.168.1.10:8123, as "
            "`edgetailor serve` prints it."
        )
    return url.rstrip("/")


def _is_host(host: str) -> bool:
    """Whether a name service could know `host`, or it is an address."""
    labels = host.removesuffix(".").split(".")
    return len(host) <= NAME and all(1 <= len(label) <= LABEL for label in labels)
