"""URLs and secrets that a client refuses before it asks anybody."""

import pytest

from device_agent.client.addresses import check_url
from device_agent.client.coordinator_client import CoordinatorClient
from refusals import refused


@pytest.mark.parametrize("url", ["", "host", "ftp://host", "http://", "http://a b/", "http://h/?q"])
def test_malformed_urls(url: str) -> None:
    with refused("client.invalid-url", url=url):
        CoordinatorClient(url, "secret")


@pytest.mark.parametrize(
    "url",
    [
        "http://..", "http://a..b", "http://.", "http://h:0", f"http://{'a' * 300}",
        f"http://{'a' * 64}.org", f"http://{'.'.join(['a' * 60] * 5)}", "http://h:1\n",
    ],
)  # fmt: skip
def test_impossible_host_names(url: str) -> None:
    with refused("client.invalid-url") as error:
        check_url(url)
    assert len(str(error.value)) < 220
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "url", ["http://h", "http://h./", "http://[::1]:80", f"https://{'a' * 63}.org", "http://h/@x"]
)
def test_possible_host_names(url: str) -> None:
    assert check_url(url) == url.rstrip("/")


@pytest.mark.parametrize(
    "url", ["http://user:hush@host", "http://hush@host:1", "user:hush@host", "http://a:hush@h:x"]
)
def test_a_password_is_refused_and_not_repeated(url: str) -> None:
    with refused("client.url-with-password") as error:
        check_url(url)
    assert "hush" not in str(error.value)


def test_secret_of_several_lines() -> None:
    with refused("join.invalid-token"):
        CoordinatorClient("http://host", "one\ntwo")
