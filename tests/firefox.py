"""Debian's Firefox without a window, driven by WebDriver BiDi."""

import itertools
import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phones import PATIENCE_MS

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

PREFERENCES = {
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "toolkit.telemetry.reportingpolicy.firstRun": False,
    "remote.active-protocols": 1,  # BiDi
}


class Tab:
    """The only tab of a Firefox."""

    def __init__(self, connection: "ClientConnection") -> None:
        self._connection, self._numbers = connection, itertools.count(1)
        self.told("session.new", capabilities={})
        self.context = self.told("browsingContext.getTree")["contexts"][0]["context"]

    def told(self, method: str, **given: object) -> Any:
        """The answer to a command. Raises AssertionError if it is an error."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": given}))
        while (came := json.loads(self._connection.recv(60))).get("id") != number:
            pass  # an event
        assert came["type"] == "success", came
        return came["result"]

    def goto(self, url: str) -> None:
        self.told("browsingContext.navigate", context=self.context, url=url, wait="complete")

    def evaluate(self, expression: str) -> object:
        """The value of an expression, as JSON can have it, or what it promises."""
        came = self.told(
            "script.evaluate",
            expression=f"Promise.resolve({expression}).then(JSON.stringify)",
            target={"context": self.context},
            awaitPromise=True,
            userActivation=True,
        )
        assert came["type"] == "success", came
        return json.loads(came["result"].get("value", "null"))

    def before_pages(self, script: str) -> None:
        """Run `script` in every page before its own scripts."""
        self.told("script.addPreloadScript", functionDeclaration=f"() => {{ {script} }}")

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def wait_for(self, condition: str) -> None:
        until = time.monotonic() + PATIENCE_MS / 1000
        while not self.evaluate(condition):
            assert time.monotonic() < until, self.evaluate("document.body.innerText")
            time.sleep(0.1)

    def choose_file(self, selector: str, file: Path) -> None:
        located = self.told(
            "browsingContext.locateNodes",
            context=self.context,
            locator={"type": "css", "value": selector},
        )
        element = {"sharedId": located["nodes"][0]["sharedId"]}
        self.told("input.setFiles", context=self.context, element=element, files=[str(file)])


@contextmanager
def firefox(profile: Path) -> Iterator[Tab]:
    """A Firefox with a new profile in `profile`."""
    from websockets.sync.client import connect  # only `make test-web` installs it

    profile.mkdir()
    (profile / "user.js").write_text(
        "".join(f"user_pref({json.dumps(k)}, {json.dumps(v)});\n" for k, v in PREFERENCES.items())
    )
    started = subprocess.Popen(
        [
            *("firefox-esr", "--headless", "--no-remote"),
            *("--profile", str(profile), "--remote-debugging-port", "0"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stderr is not None
        lines = (re.search(r"BiDi listening on (ws://\S+)", line) for line in started.stderr)
        address = next(match[1] for match in lines if match)
        with connect(f"{address}/session", max_size=None) as connection:
            yield Tab(connection)
    finally:
        started.terminate()
        started.wait(30)
