"""Training in a page beside a native agent: time and memory by family, on one thread each.

A page in headless Chromium and a native agent train the same bundles of one federation in turns:
first the page, then the agent, ROUNDS times. Times are those of a whole training with its sessions;
their ratio is given as the median over the rounds. Memory is the peak above the idle program: of
the tab's process (without graphics), and of the agent's. A step and the memory of the page stand
beside their predictions, from the page's own calibration. At last, pages are opened anew: from the
link to the first training step. Linux only. Run `make bench-page`.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser, Page, sync_playwright

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.membership import join
from device_agent.formats.protocol.rounds import Work
from phones import Keeping, Phone, serving
from profiles.cost_model.memory_rule import IN_BROWSER
from profiles.cost_model.prediction import predict
from profiles.documents.calibration_record import Calibration
from toolkit.coordinator.server import Server
from toolkit.planning.submodel_workloads import Workloads
from toolkit.submodels.model_loading import load_global
from vector_fleet import full_token, send

ROUNDS, BATCH, BATCHES = 3, 16, 40
VISITS = 5
"""How often the page is opened anew."""
MB = 1e6
CP = "cp:2.0,personal-steps=2,factor-steps=3"
RESNET20 = ("toolkit.models:resnet20", (3, 32, 32), 10)
CASES = [
    *((RESNET20, spec) for spec in ("full", "low-rank:0.25", "slice:0.4", "width:0.5", CP)),
    (("toolkit.models:femnist_cnn", (1, 28, 28), 62), "full"),
    (("foreign_models:Recurrent", (7, 6), 3), "full"),
]
TOML = """
model = "{model}"
input_shape = {shape}
rounds = {rounds}
held_out = "held_out.npz"
port = 0
[training]
batch_size = {batch}
[[devices]]
name = "phone"
submodel = "{spec}"
count = 2
"""
NATIVE = """
import json, pathlib, sys, time
from device_agent.training.bundle_training import train_bundle
from device_agent.training.training_options import TrainingOptions
def peak(): return int(next(
    line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
import onnxruntime
idle, begun = peak(), time.perf_counter()
bundle, data, out, seed = sys.argv[1:]
options = TrainingOptions(threads=1, seed=int(seed))
train_bundle(pathlib.Path(bundle), data, pathlib.Path(out), options=options)
print(json.dumps([time.perf_counter() - begun, peak() - idle]))
"""


def peak(process: int, reset: bool = False) -> int:
    """The peak of a process's resident memory in bytes, since the last `reset`."""
    if reset:
        Path(f"/proc/{process}/clear_refs").write_text("5")
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def tab_process(browser: Browser, page: Page) -> int:
    """The process of the only tab: the renderer that has run longest."""
    session = browser.new_browser_cdp_session()
    processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
    renderers = [process for process in processes if process["type"] == "renderer"]
    return max(renderers, key=lambda process: process["cpuTime"])["id"]


def trained_natively(link: CoordinatorClient, work: Work, folder: Path, data: Path) -> list[float]:
    """Seconds and bytes of a native training of the open round; its update is sent."""
    for offer in work.files:
        link.download(offer, folder / "bundle" / offer.name)
    done = subprocess.run(
        [sys.executable, "-c", NATIVE, folder / "bundle", data, folder / "update", "0"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    send(link, work.round, folder / "update")
    return json.loads(done.stdout)


def until(condition: Callable[[], bool], page: Page) -> None:
    while not condition():
        page.wait_for_timeout(50)


class AnyFits:
    def submodel(self, kind: object, device: object) -> str:
        return "full"


def calibrated(browser: Browser, folder: Path) -> Calibration:
    """What a page measures about this browser before it joins a kind that is planned for."""
    with started(folder, RESNET20, "auto") as server:
        keeping = server.coordinator.planner = Keeping(AnyFits())
        phone = Phone.opened(browser, server, "phone")
        phone.join("page")
        phone.wait_for("joined")
        phone.page.context.close()
    return keeping.seen[0].calibration


def started(folder: Path, model: tuple, spec: str) -> AbstractContextManager[Server]:
    """A coordinator of a federation of two devices with random data, which lie in `folder`."""
    name, shape, classes = model
    draw = np.random.default_rng(0)
    x = draw.normal(size=(BATCH * BATCHES, *shape)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=draw.integers(classes, size=len(x)))
    np.savez(folder / "held_out.npz", x=x[:20], y=draw.integers(classes, size=20))
    text = TOML.format(model=name, shape=list(shape), rounds=ROUNDS, batch=BATCH, spec=spec)
    return serving(text, folder)


def from_the_link(browser: Browser, folder: Path) -> float:
    """Seconds from opening the link to the first training step; the owner's hands take none."""
    with started(folder, RESNET20, "full") as server:
        join(server.url, full_token(server.config, "phone"), "native", folder / "native")
        begun = time.perf_counter()
        phone = Phone.opened(browser, server, "phone")
        phone.train(folder / "data.npz", "page")
        until(lambda: (phone.view() or {}).get("training") is not None, phone.page)
        seconds = time.perf_counter() - begun
        phone.page.context.close()
    return seconds


def measure(
    browser: Browser, folder: Path, model: tuple, spec: str, calibration: Calibration
) -> list[str]:
    """A row of the table: one federation of a page and a native agent."""
    with started(folder, model, spec) as server:
        config = server.config
        module, _ = load_global(config.model, config.weights, config.seed)
        workloads = Workloads(module, model[1], config.training)
        known = join(server.url, full_token(config, "phone"), "native", folder / "native")
        link = CoordinatorClient(server.url, known.secret)
        phone = Phone.opened(browser, server, "phone")
        phone.join("page")
        phone.wait_for("joined")
        process = tab_process(browser, phone.page)
        idle = peak(process, reset=True)
        phone.page.get_by_label("Data file").set_input_files(str(folder / "data.npz"))
        phone.page.get_by_role("button", name="Start training").click()
        times, memory, seen, step = [], 0.0, 0.0, 0.0
        for round_ in range(1, ROUNDS + 1):
            until(lambda: bool(server.coordinator.rounds.updates), phone.page)
            trained, step = phone.view()["trainedSeconds"], phone.page.evaluate("window.step")
            work = link.work()
            seconds, memory = trained_natively(
                link, work, folder / str(round_), folder / "data.npz"
            )
            times.append((trained - seen, seconds))
            seen = trained
            until(lambda done=round_: server.coordinator.rounds.done >= done, phone.page)
        page_peak = peak(process) - idle
        phone.page.context.close()
    page, native = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(a / b for a, b in times)
    predicted = predict(workloads.of(spec).work, calibration)
    assert predicted.step is not None
    growth = predicted.memory.value - IN_BROWSER.idle_bytes
    return [
        f"{model[0].split(':')[1]} `{spec}`",
        *(f"{page:.2f} s", f"{native:.2f} s", f"{ratio:.2f}"),
        *(f"{1000 * step:.1f} ms", f"{1000 * predicted.step.value:.1f} ms"),
        *(f"{page_peak / MB:.0f} MB", f"{growth / MB:.0f} MB", f"{memory / MB:.0f} MB"),
    ]


def main() -> None:
    """Print the table, then the seconds from the link to the first step."""
    with sync_playwright() as playwright:

        def fresh(measured: Callable[[Browser, Path], Any]) -> Any:
            browser = playwright.chromium.launch(
                executable_path="/usr/bin/chromium", args=["--no-sandbox"]
            )
            with tempfile.TemporaryDirectory() as folder:
                result = measured(browser, Path(folder))
            browser.close()
            return result

        calibration = fresh(calibrated)
        columns = ("model and submodel", "page", "native", "ratio", "step", "predicted step")
        columns += ("page's memory", "predicted", "native memory")
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for model, spec in CASES:
            row = fresh(partial(measure, model=model, spec=spec, calibration=calibration))
            print(f"| {' | '.join(row)} |", flush=True)
        seconds = sorted(fresh(from_the_link) for _ in range(VISITS))
        shown = ", ".join(f"{visit_s:.1f}" for visit_s in seconds)
        print(f"\nFrom the link to the first step: {shown} s")


if __name__ == "__main__":
    main()
