"""Where a coordinator is and what lets a device in there, checked before either is used."""

import urllib3
from urllib3.exceptions import LocationValueError

from profiles.errors import InputError


def check_secret(secret: str) -> str:
    """`secret`, where a header can hold it. Raises InputError otherwise."""
    if not secret.isascii() or not secret.isprintable() or not secret or " " in secret:
        raise InputError(
            "A token is one word of plain characters: give the file that "
            "`edgetailor serve` wrote, unaltered."
        )
    return secret


def check_url(url: str) -> str:
    """`url` without a slash at its end. Raises InputError unless it is http(s)://HOST[:PORT]."""
    try:
        parsed = urllib3.util.parse_url(url)
    except LocationValueError:
        parsed = urllib3.util.Url()
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise InputError(
            f"{url!r} is no coordinator's URL: write it like http://192.168.1.10:8123, as "
            "`edgetailor serve` prints it."
        )
    return url.rstrip("/")
