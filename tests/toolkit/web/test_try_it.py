"""The view "Try the model": the phone answers as plain PyTorch does with the same weights."""

import base64
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load
from torch import nn

import sample_models
from device_agent.data.pictures import read_picture
from phones import Phone, fleet, keep_updates, with_script_before_worker
from picture_phones import (
    CLASSES,
    CLOSE,
    IMAGES,
    SHAPE,
    prepared,
    shared_model,
    trained,
    tried,
    with_tensors,
)

pytestmark = pytest.mark.web

PICTURES = 50
PERSONAL = """async () => {
  const root = await navigator.storage.getDirectory();
  const folder = await root.getDirectoryHandle("results");
  let newest = null;
  for (const name of ["personal.0", "personal.1"]) {
    const file = await (await folder.getFileHandle(name)).getFile();
    const bytes = new Uint8Array(await file.arrayBuffer());
    const serial = bytes.length > 40 ? new DataView(bytes.buffer).getBigUint64(32) : 0n;
    if (newest === null || serial > newest.serial) newest = { serial, bytes: bytes.slice(40) };
  }
  return btoa(String.fromCharCode(...newest.bytes));
}"""
"""The safetensors of the personal model, which the page has stored."""


def picture(path: Path, draw: np.random.Generator) -> Path:
    """A picture of any size, in which each class would see something else."""
    size = tuple(int(side) for side in draw.integers(8, 60, size=2))
    values = draw.integers(256, size=(*size, 3), dtype=np.uint8) * draw.random(3)
    Image.fromarray(values.astype(np.uint8)).save(path)
    return path


def pictures(folder: Path, seed: int, count: int) -> list[Path]:
    folder.mkdir()
    draw = np.random.default_rng(seed)
    return [picture(folder / f"{number:02}.png", draw) for number in range(count)]


def probabilities(model: nn.Module, file: Path) -> np.ndarray:
    x = torch.from_numpy(read_picture(file, IMAGES, SHAPE))[None]
    with torch.no_grad():
        return model.eval()(x).softmax(1)[0].numpy()


def assert_answers(phone: Phone, model: nn.Module, files: list[Path]) -> None:
    for file in files:
        answer = tried(phone, file)["answer"]
        expected = probabilities(model, file)
        np.testing.assert_allclose(answer["probabilities"], expected, rtol=0, atol=CLOSE)


def test_a_new_picture_without_a_network(browser, serve, tmp_path: Path, seed: int) -> None:
    """The federation is over, the server is gone, and the page is opened again."""
    with serve(*prepared(tmp_path / "c")) as server:
        phone = trained(browser, server, "phone", pictures(tmp_path / "own", seed, 12))
        phone.wait_for("finished")
        phone.page.evaluate("navigator.serviceWorker.ready.then(() => true)")
        model = with_tensors(shared_model(server, 1))
    phone.killed()
    page = phone.page
    phone.wait_for("finished")
    page.get_by_text("The answer comes from the shared model at the start of round 2.").wait_for()
    files = pictures(tmp_path / "new", seed + 1, PICTURES)
    assert_answers(phone, model, files)
    expected = probabilities(model, files[-1])
    best = int(expected.argmax())
    page.get_by_text(f"Most probable: {CLASSES[best]}, {expected[best]:.0%}").wait_for()
    shown = [page.locator("#try-classes li").nth(row).inner_text().split() for row in range(3)]
    order = np.argsort(-expected)
    assert shown == [[CLASSES[index], f"{expected[index]:.0%}"] for index in order]
    assert page.locator("section:visible h2").first.inner_text() == "Try the model"
    assert phone.view()["problem"] is None


KINDS = {
    "part": "slice:hidden",
    "small": "slice:norm,recording=float16",
    "personal": "cp:2.0,penalty=2.0,personal-steps=2,factor-steps=3,factor-rate=0.001",
    "dense": "pfedme",
}


def personal_model(phone: Phone, update: dict[str, np.ndarray]) -> nn.Module:
    """The personal model that the page keeps, with the statistics of this device's own update."""
    kept = load(base64.b64decode(phone.page.evaluate(PERSONAL)))
    own = {name.removeprefix("personal:"): value for name, value in kept.items()}
    return with_tensors(own | {k: v for k, v in update.items() if "running" in k})


def test_slices_and_personal_models(browser, serve, tmp_path: Path, seed: int) -> None:
    with serve(*prepared(tmp_path / "c", kinds=KINDS)) as server:
        sent = keep_updates(server)
        phones = {
            kind: trained(browser, server, kind, pictures(tmp_path / kind, seed + number, 12))
            for number, kind in enumerate(KINDS)
        }
        for phone in phones.values():
            phone.wait_for("finished")
        shared = with_tensors(shared_model(server, 1))
    new = pictures(tmp_path / "new", seed + 9, 5)
    for kind in ("part", "small"):
        assert_answers(phones[kind], shared, new)
        phones[kind].page.get_by_text("The answer comes from the shared model").wait_for()
    for kind in ("personal", "dense"):
        own = personal_model(phones[kind], sent[f"phone {kind}", 2])
        assert_answers(phones[kind], own, new)
        said = "from your personal model, as this device trained it in round 2."
        phones[kind].page.get_by_text(said).wait_for()
        statistics = {k: v for k, v in shared.state_dict().items() if "running" in k}
        own.load_state_dict(statistics, strict=False)
        other = probabilities(own, new[-1])
        assert np.abs(other - phones[kind].view()["trial"]["answer"]["probabilities"]).max() > 1e-3


SERIES = """[data]
kind = "series"
columns = ["ax", "ay", "az", "gx", "gy", "gz"]
label = "what"
classes = ["sit", "walk", "run"]
mean = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
std = [1, 2, 1, 2, 1, 2]"""
COLUMNS = ("ax", "ay", "az", "gx", "gy", "gz")


def table(path: Path, rows: np.ndarray, labels: list[str] | None = None) -> Path:
    lines = [",".join([*COLUMNS, *(["what"] if labels else [])])]
    for number, row in enumerate(rows):
        lines.append(",".join([*(f"{x:.5f}" for x in row), *([labels[number]] if labels else [])]))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("channels", ["first", "last"])
def test_the_last_lines_of_a_table(
    browser, serve, tmp_path: Path, seed: int, channels: str
) -> None:
    """It has no labels: what it was is the question."""
    draw = np.random.default_rng(seed)
    labels = ["sit"] * 14 + ["walk"] * 14
    own = table(tmp_path / "own.csv", draw.normal(size=(28, 6)), labels)
    shape = (6, 7) if channels == "first" else (7, 6)
    given = {"model": f"sample_models:series_{channels}", "shape": shape, "batch_size": 2}
    data = f'{SERIES}\nchannels = "{channels}"'
    with serve(*fleet(tmp_path / "c", classes=3, top=data, **given)) as server:
        phone = Phone.opened(browser, server, "phone")
        phone.join("phone")
        phone.page.get_by_label("Measurements (CSV)").set_input_files(str(own))
        phone.start()
        phone.wait_for("finished")
        model = getattr(sample_models, f"series_{channels}")()
        tensors = shared_model(server, 1)
        model.load_state_dict({k: torch.from_numpy(v) for k, v in tensors.items()})
    rows = draw.normal(size=(30, 6)).round(5)
    answer = tried(phone, table(tmp_path / "new.csv", rows))["answer"]
    mean, std = np.arange(1, 7) / 10, np.array([1, 2, 1, 2, 1, 2])
    window = ((rows[-7:] - mean) / std).astype(np.float32)
    x = torch.from_numpy(window.T.copy() if channels == "first" else window)[None]
    expected = model(x).softmax(1)[0].detach().numpy()
    np.testing.assert_allclose(answer["probabilities"], expected, rtol=0, atol=CLOSE)
    phone.page.get_by_text("The last 7 lines of new.csv").wait_for()
    phone.page.locator("#try-file").set_input_files(str(table(tmp_path / "short.csv", rows[:6])))
    phone.page.locator("#try-problem").get_by_text("7 lines in a row").wait_for()


NO_ROOM = """
addEventListener("message", ({ data }) => {
  if (data.do !== "try" || !data.file.name.startsWith("large")) return;
  WebAssembly.Memory.prototype.grow = () => { throw new RangeError("Maximum memory size"); };
});
"""
"""The runtime's memory cannot grow any more when the worker gets a file with such a name."""
FORGET = """async () => {
  const root = await navigator.storage.getDirectory();
  const folder = await root.getDirectoryHandle("bundle");
  for await (const name of folder.keys()) await folder.removeEntry(name);
}"""
"""Removes the stored bundle, as a browser without room does."""


def test_trials_without_an_answer(browser, serve, tmp_path: Path, seed: int) -> None:
    """No model yet, too little memory, no picture, a model that the browser has removed."""
    draw = np.random.default_rng(seed)
    new, large = (picture(tmp_path / f"{name}.png", draw) for name in ("new", "large"))
    (tmp_path / "broken.png").write_bytes(new.read_bytes()[:60])
    settings = {"model": "sample_models:large_for_pictures", "epochs": 1, "rounds": 1, "count": 2}
    page_without_room = with_script_before_worker(NO_ROOM)
    with serve(*prepared(tmp_path / "c", **settings), page=page_without_room) as server:
        phone = trained(browser, server, "phone", pictures(tmp_path / "own", seed, 3))
        page = phone.page
        page.get_by_text("Then you can try it here.").wait_for()
        assert page.locator("#try-file").is_disabled()
        other = trained(browser, server, "phone", pictures(tmp_path / "other", seed + 1, 3))
        for joined in (phone, other):
            joined.wait_for("finished")
        page.reload()
        phone.wait_for("finished")
        for file, code, words in (
            (large, "trial.no-memory", "not enough memory"),
            (tmp_path / "broken.png", "data.unreadable-file", "broken.png is not a picture"),
        ):
            page.locator("#try-file").set_input_files(str(file))
            page.locator("#try-problem").get_by_text(words).wait_for()
            assert phone.view()["trialProblem"]["code"] == code
        page.reload()
        phone.wait_for("finished")
        assert sum(tried(phone, new)["answer"]["probabilities"]) == pytest.approx(1)
        page.evaluate(FORGET)
        page.locator("#try-file").set_input_files(str(new))
        page.locator("#try-problem").get_by_text("has removed the model").wait_for()
