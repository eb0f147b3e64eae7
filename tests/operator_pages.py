"""The operator's page as tests use it: small built files, and a client that logs in."""

import re
from pathlib import Path

import httpx

from built_page import FILES, OPERATOR_FILES, build_page
from toolkit.web.built_page import Page, read_page


def built_files(folder: Path) -> Page:
    """Files that stand for the built ones."""
    page = read_page(build_page(folder / "built", {**FILES, **OPERATOR_FILES}))
    assert page is not None
    return page


def log_in(client: httpx.Client, secret: str, **headers: str) -> httpx.Response:
    """Log in at the page of the coordinator with the token `secret`."""
    return client.post("/operator/login", data={"token": secret}, headers=headers)


def form_token(client: httpx.Client) -> str:
    """What the forms of this login send."""
    found = re.search(r'name="form_token" value="([^"]+)"', client.get("/operator/").text)
    assert found is not None
    return found[1]
