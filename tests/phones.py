"""Devices for the tests of the page: phones, which are pages, and native agents beside them."""

import json
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from commands import ROOT
from device_agent.federation import round_loop
from device_agent.federation.membership import join
from device_agent.federation.run_options import RunOptions
from device_agent.formats.protocol.rounds import Receipt
from device_agent.training.bundle_training import train_bundle
from models_for_tests import CLASSES, INPUT_SHAPE
from profiles.documents.device_profile import DeviceProfile
from toolkit.coordinator.database.device_registry import Device
from toolkit.coordinator.devices.planned_submodel import SubmodelPlanner
from toolkit.coordinator.federation_file.device_kinds import DeviceKind
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.server import Server
from toolkit.web.built_page import Page as WebPage
from toolkit.web.built_page import read_page
from vector_fleet import full_token, running

PATIENCE_MS = 180_000
AXE = ROOT / "toolkit/web/node_modules/axe-core/axe.min.js"
KEEP_VIEWS = """
const Original = Worker;
window.views = [];
window.Worker = class extends Original {
  constructor(...given) {
    super(...given);
    this.addEventListener("message", ({ data }) => {
      window.view = data.view;
      window.views = [...window.views.slice(-99), data.view];
      window.step = data.view.training?.batchSeconds ?? window.step;
    });
  }
};
"""
"""Keeps the last Views that the worker has posted, and the time of a step, for tests to read."""
STORED = """(name) => new Promise((done) => {
  const opened = indexedDB.open("edgetailor");
  opened.onsuccess = () => {
    const wanted = opened.result.transaction("values").objectStore("values").get(name);
    wanted.onsuccess = () => { opened.result.close(); done(wanted.result); };
  };
})"""
STORE = """(values) => new Promise((done) => {
  const opened = indexedDB.open("edgetailor");
  opened.onsuccess = () => {
    const change = opened.result.transaction("values", "readwrite");
    for (const name in values) change.objectStore("values").put(values[name], name);
    change.oncomplete = () => { opened.result.close(); done(); };
  };
})"""

SLOW = """
const post = self.postMessage.bind(self);
let last = "";
self.postMessage = (message) => {
  post(message);
  const { device, training } = message.view ?? {};
  const batch = `${training?.epoch}.${training?.batch}`;
  if (!training || !device.name.startsWith("slow") || batch === last) return;
  last = batch;
  for (const begun = performance.now(); performance.now() - begun < %d; );
};
"""
"""Keeps the worker of a device with such a name in each batch, as a larger model would."""


def with_slow_steps(milliseconds: int) -> WebPage:
    """The page, whose batches take so much longer on devices with a name like "slow"."""
    return with_script_before_worker(SLOW % milliseconds)


def with_timers(factor: float, longer_than_ms: int = 0) -> WebPage:
    """The page, in whose worker long waits take `factor` times as long."""
    return with_script_before_worker(
        "const later = self.setTimeout; self.setTimeout = (f, ms) => "
        f"later(f, ms > {longer_than_ms} ? {factor} * ms : ms);"
    )


def with_script_before_worker(script: str) -> WebPage:
    """The built page, whose worker begins with `script`."""
    page = read_page()
    assert page is not None
    [name] = (file for file in page if file.startswith("worker."))
    worker = page[name]
    body = script.encode() + worker.bodies["identity"]
    return {**page, name: replace(worker, bodies={"identity": body})}


FLEET = """
model = "{model}"
input_shape = {shape}
rounds = {rounds}
held_out = "held_out.npz"
port = 0
{top}
[training]
batch_size = {batch_size}
epochs = {epochs}
{training}
"""
KIND = """
[[devices]]
name = "{name}"
submodel = "{submodel}"
count = {count}
"""


@contextmanager
def serving(toml: str, folder: Path, page: WebPage | None = None) -> Iterator[Server]:
    """A coordinator of the real model that `toml` describes, by default with the page as built."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fleet.toml").write_text(toml)
    config = load_config(folder / "fleet.toml")
    with running(config, federation(config), page=page or read_page()) as server:
        yield server


def fleet(
    folder: Path,
    *,
    model: str = "models_for_tests:smooth_cnn",
    shape: tuple[int, ...] = INPUT_SHAPE,
    classes: int = CLASSES,
    kinds: Mapping[str, str] | None = None,
    count: object = 1,
    **settings: object,
) -> tuple[str, Path]:
    """The file of a federation and its folder, a new one, in which its held-out samples are.

    `count` is the number of devices of each of the `kinds`, which are submodels by name. `settings`
    are rounds, batch_size, epochs, and lines: of `training`, and at the `top`.
    """
    folder.mkdir()
    samples(folder, 99, 0, 20, shape, classes).rename(folder / "held_out.npz")
    usual = {"rounds": 2, "batch_size": 8, "epochs": 2, "training": "momentum = 0.9", "top": ""}
    toml = FLEET.format(model=model, shape=list(shape), **usual | settings)
    for name, submodel in (kinds or {"phone": "full"}).items():
        toml += KIND.format(name=name, submodel=submodel, count=count)
    return toml, folder


def samples(
    folder: Path,
    seed: int,
    number: int,
    size: int,
    shape: tuple[int, ...] = INPUT_SHAPE,
    classes: int = CLASSES,
) -> Path:
    """A file of `size` samples, written into `folder`; another one for each `number`."""
    draw = np.random.default_rng([seed, number])
    x = draw.normal(0.2 * number, 1, (size, *shape)).astype(np.float32)
    path = folder / f"data-{number}.npz"
    np.savez_compressed(path, x=x, y=draw.integers(classes, size=size))
    return path


def token(server: Server, kind: str) -> str:
    return full_token(server.config, kind)


Sent = dict[tuple[str, int], dict[str, np.ndarray]]
"""The tensors of updates, by the name of the device and the round."""


def keep_updates(server: Server) -> Sent:
    """Keep the tensors of every update that `server` takes from here on."""
    sent: Sent = {}
    coordinator, take = server.coordinator, server.coordinator.take_update

    def take_update(device: Device, round_: int, body: bytes) -> Receipt:
        path = coordinator.store.blobs.path(json.loads(body)["file"]["sha256"])
        tensors = load_file(path)
        receipt = take(device, round_, body)
        sent[device.name, round_] = tensors
        return receipt

    coordinator.take_update = take_update  # type: ignore[method-assign]
    return sent


def keep_records(server: Server) -> list[dict[str, Any]]:
    """Keep the records of all updates that `server` takes from here on, in their order."""
    records: list[dict[str, Any]] = []
    take = server.coordinator.take_update

    def take_update(device: Device, round_: int, body: bytes) -> Receipt:
        records.append(json.loads(body))
        return take(device, round_, body)

    server.coordinator.take_update = take_update  # type: ignore[method-assign]
    return records


@dataclass
class Phone:
    """One page in a browser profile of its own."""

    page: Any

    @classmethod
    def opened(
        cls,
        browser: Any,
        server: Server,
        kind: str,
        language: str = "en",
        url: str | None = None,
        link: str | None = None,
    ) -> "Phone":
        """A page at `server`, or at the `url` of a proxy before it, with the token `link`."""
        context = browser.new_context(ignore_https_errors=True, locale=language)
        page = context.new_page()
        phone = cls(page)
        page.add_init_script(KEEP_VIEWS)
        page.goto(f"{url or server.url}/join/#{link or token(server, kind)}")
        return phone

    def killed(self) -> None:
        """Close the tab without a warning, and open the page again in the same profile."""
        self.page.close()
        self.page = self.in_another_tab().page

    def in_another_tab(self) -> "Phone":
        """The same page, in the same profile."""
        page = self.page.context.new_page()
        page.add_init_script(KEEP_VIEWS)
        page.goto(self.page.url)
        return Phone(page)

    def reloaded(self) -> None:
        """Reload the page, as a person or the browser does, whatever its worker is doing."""
        self.page.reload()

    def view(self) -> dict[str, Any]:
        """The last View that the worker has posted."""
        return self.page.evaluate("window.view")

    def join(self, name: str) -> None:
        self.page.get_by_label("Name of this device").fill(name)
        self.page.get_by_role("button", name="Join").click()

    def joined(self, name: str, data: Path) -> "Phone":
        """Join, and choose the data."""
        self.join(name)
        self.wait_for("joined")
        self.page.get_by_label("Data file").set_input_files(str(data))
        self.page.locator("#data").get_by_text("examples").wait_for()
        return self

    def start(self) -> None:
        self.page.get_by_role("button", name="Start training").click()

    def train(self, data: Path, name: str) -> None:
        """Join, choose the data and start, as an owner does."""
        self.join(name)
        self.page.get_by_label("Data file").set_input_files(str(data))
        self.start()

    def leave(self) -> None:
        """Leave and erase, and say yes when the page asks."""
        leave = {"name": "Leave and erase"}
        self.page.get_by_role("button", **leave).first.click()
        self.page.get_by_role("dialog").get_by_role("button", **leave).click()

    def stored(self, name: str) -> Any:
        """A value that the page has stored."""
        return self.page.evaluate(STORED, name)

    def store(self, **values: object) -> None:
        self.page.evaluate(STORE, values)

    def wait_for_problem(self, code: str) -> None:
        matches = f"[view?.problem?.code, view?.dataProblem?.code].includes({json.dumps(code)})"
        self.wait_until(f"() => {{ const view = window.view; return {matches} }}")

    def wait_for(self, stage: str) -> None:
        self.wait_until(f"() => window.view?.stage === {json.dumps(stage)}")

    def wait_until(self, condition: str) -> None:
        """Wait until a JavaScript function returns true."""
        until = time.monotonic() + PATIENCE_MS / 1000
        while not self.page.evaluate(condition):
            assert time.monotonic() < until, (condition, self.view())
            self.page.wait_for_timeout(50)


def assert_accessible_page(page: Any, view: str, sizes: Iterable[tuple[int, int]]) -> None:
    """Check `view` of a page by axe-core, and its width, on screens of these sizes in pixels."""
    for width, height in sizes:
        for scheme in ("light", "dark"):
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(color_scheme=scheme)
            page.evaluate(AXE.read_text())  # not a script of the page, whose policy forbids it
            violations = page.evaluate("axe.run().then((result) => result.violations)")
            where = f"{view}, {width} x {height}, {scheme}"
            assert not violations, (where, [(v["id"], v["nodes"][0]["html"]) for v in violations])
            wide = page.evaluate("document.scrollingElement.scrollWidth")
            assert wide <= width, f"{where}: {wide} pixels wide"


@dataclass
class Keeping:
    """A planner that keeps the profiles that it plans for."""

    planner: SubmodelPlanner
    seen: list[DeviceProfile] = field(default_factory=list)

    def submodel(self, kind: DeviceKind, device: DeviceProfile) -> str:
        self.seen.append(device)
        return self.planner.submodel(kind, device)


@dataclass
class NativeAgent:
    """An agent in a thread, and copies of the updates that it has trained."""

    server: Server
    kind: str
    state: Path
    data: Path
    options: dict[str, Any] = field(default_factory=dict)
    sent: dict[int, Path] = field(default_factory=dict)

    def start(self) -> None:
        join(self.server.url, token(self.server, self.kind), self.state.name, self.state)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        def train(bundle: Path, data: str, out: Path, **options: Any) -> object:
            trained = train_bundle(bundle, data, out, **options)
            round_ = options["options"].seed
            self.sent[round_] = self.state.with_name(f"{self.state.name}-round-{round_}")
            shutil.copytree(out, self.sent[round_])
            return trained

        options = RunOptions(data=str(self.data), state=self.state, **self.options)
        round_loop.run(options, train=train, sleep=lambda seconds: time.sleep(0.1))

    def finish(self) -> None:
        self._thread.join(PATIENCE_MS / 1000)
