"""Checks of the coordinator's URL and of tokens, before they are used."""

import urllib3
from urllib3.exceptions import LocationValueError

from profiles.errors import InputError

LABEL_LENGTH, NAME_LENGTH = 63, 253
"""The most characters in a label of a host name, and in the whole name (RFC 1035)."""
SHOWN_LENGTH = 100
"""The most characters of a URL that an error repeats."""


def check_secret(secret: str) -> str:
    """Check that a header can contain `secret`, which is a join token or a device's secret.

    Returns:
        `secret`.

    Raises:
        InputError: `secret` is empty, or has spaces, line breaks or characters outside of ASCII.
    """
    if not one_word(secret):
        raise InputError(
            "A token is one word of ASCII characters. Give the file that `edgetailor serve` "
            "wrote, unaltered.",
            code="join.invalid-token",
        )
    return secret


def one_word(text: str) -> bool:
    """Whether `text` is one word of printable ASCII characters."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def check_url(url: str) -> str:
    """Check the URL of a coordinator.

    Args:
        url: The URL, http(s)://HOST[:PORT].

    Returns:
        The URL without a slash at its end.

    Raises:
        InputError: `url` is not such a URL, or has a user name or a password. The message does not
            show the password.
    """
    # Report typos here: urllib3 reports some as a failed connection, which would be retried.
    try:
        parsed = urllib3.util.parse_url(url)
    except LocationValueError:
        parsed = urllib3.util.Url()
    fine = parsed.scheme in ("http", "https") and not parsed.query and not parsed.fragment
    fine = fine and _is_host(parsed.host or "") and parsed.port != 0
    # A malformed URL with an @ may hold a password that the parser did not recognise.
    if parsed.auth is not None or (not fine and "@" in url):
        raise InputError(
            "The coordinator's URL must not contain a user name or a password, but this URL has an "
            "@ before the host. Write it like http://192.168.1.10:8123, as `edgetailor serve` "
            "prints it. The token in --token-file gives access.",
            code="client.url-with-password",
        )
    if not fine:
        shown = url if len(url) <= SHOWN_LENGTH else f"{url[:SHOWN_LENGTH]}..."
        raise InputError(
            "Invalid URL of a coordinator {url!r}: write it like http://192.168.1.10:8123, as "
            "`edgetailor serve` prints it.",
            code="client.invalid-url",
            url=shown,
        )
    return url.rstrip("/")


def _is_host(host: str) -> bool:
    """Whether `host` can be an address or a name in the DNS."""
    labels = host.removesuffix(".").split(".")
    return len(host) <= NAME_LENGTH and all(1 <= len(label) <= LABEL_LENGTH for label in labels)
