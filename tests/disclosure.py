"""What a page sends, held against the list of what leaves the device."""

import json
import re
from typing import Any
from urllib.parse import urlsplit


class Listener:
    """Keeps the fields of every request that a page makes, like "POST /progress note"."""

    def __init__(self, page: Any) -> None:
        self.sent: set[str] = set()
        page.on("request", self._note)

    def _note(self, request: Any) -> None:
        path = urlsplit(request.url).path
        if not path.startswith("/v1/"):
            return
        path = re.sub(r"/rounds/\d+", "/rounds/{round}", path.removeprefix("/v1"))
        path = re.sub(r"/releases/\d+", "/releases/{number}", path)
        path = re.sub(r"/[0-9a-f]{64}", "/{sha256}", path)
        request_name = f"{request.method} {path}"
        if request.headers.get("content-type") == "application/octet-stream":
            self.sent.add(f"{request_name} tensors")
        elif request.post_data:
            for field, value in json.loads(request.post_data).items():
                self.sent.add(f"{request_name} {field}")
                if field == "profile" and value is not None:
                    self.sent |= {f"{request_name} profile {key}" for key in value}


def told(page: Any) -> dict[str, str]:
    """The line of the page's list for each field; empty for what the coordinator knows already."""
    lists = page.locator("#leaves, #leaves [data-fields]").evaluate_all(
        "(all) => all.map((one) => [one.matches('li') ? one.textContent : '', one.dataset.fields])"
    )
    return {field: line for line, fields in lists for field in fields.split(", ") if field}


def assert_told(page: Any, listener: Listener, *requests: str) -> None:
    """Everything that was sent has its place in the list, and of `requests` nothing more has."""
    known = told(page)
    unknown = listener.sent - known.keys()
    assert not unknown, f"sent, but not in the list: {sorted(unknown)}"
    listed = {field for field in known if field.rpartition(" ")[0] in requests}
    assert requests == () or listed
    assert not listed - listener.sent, f"in the list, but not sent: {listed - listener.sent}"
