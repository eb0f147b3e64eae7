"""Pictures and CSV files, prepared by a page as an agent prepares them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import sample_models
from device_agent.data.pictures import read_picture
from device_agent.formats.update import read_update
from phones import NativeAgent, Phone, fleet, keep_records, keep_updates, token
from picture_phones import CLASSES, IMAGES, SHAPE
from picture_phones import DATA as PICTURES

pytestmark = pytest.mark.web

SERIES = """[data]
kind = "series"
columns = ["ax", "ay", "az", "gx", "gy", "gz"]
label = "what"
classes = ["sit", "walk", "run"]
step = 3
mean = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
std = [1, 2, 1, 2, 1, 2]"""


def prepared(folder: Path, data: str, shape: tuple[int, ...], **settings: object) -> tuple:
    """A federation, like `fleet`, whose devices prepare the files of their owners."""
    kind = "pictures" if data == PICTURES else "series_last"
    usual = {"model": f"sample_models:{kind}", "batch_size": 4, "training": ""}
    return fleet(folder, shape=shape, classes=3, top=data, **usual | settings)


def equal_updates(sent: dict, agent: NativeAgent) -> None:
    for round_ in (1, 2):
        _, expected = read_update(agent.sent[round_])
        for name, value in expected.items():
            difference = np.abs(sent["phone", round_][name] - value).max()
            assert difference <= 1e-5 * max(np.abs(value).max(), 1), name


def test_pictures(browser, serve, tmp_path: Path, seed: int) -> None:
    """Lossless ones of several sizes, turned, grey and transparent; chosen class by class."""
    draw = np.random.default_rng(seed)
    modes = ("RGB", "RGBA", "L", "P")
    for number in range(14):
        folder = tmp_path / "pictures" / CLASSES[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        mode = modes[number % 4]
        size = tuple(int(side) for side in draw.integers(8, 90, size=2))
        channels = () if mode in ("L", "P") else (len(mode),)
        values = draw.integers(256, size=(*size, *channels), dtype=np.uint8)
        turned = Image.Exif()
        turned[0x0112] = 1 + number % 8
        if mode == "RGBA":
            values[..., 3] = np.where(values[..., 3] > 128, 255, 0)
        picture = Image.fromarray(values, mode)
        suffix = "webp" if number % 5 == 0 and mode == "RGB" else "png"
        picture.save(folder / f"{number:02}.{suffix}", exif=turned, lossless=True)
    with serve(*prepared(tmp_path / "c", PICTURES, SHAPE, count=2)) as server:
        sent = keep_updates(server)
        agent = NativeAgent(server, "phone", tmp_path / "native", tmp_path / "pictures")
        agent.start()
        phone = Phone.opened(browser, server, "phone")
        phone.join("phone")
        for name in CLASSES:
            files = sorted((tmp_path / "pictures" / name).iterdir())
            field = phone.page.get_by_label(f"Pictures: {name}")
            field.set_input_files([str(file) for file in files[:2]])
            field.set_input_files([str(file) for file in files[2:]])
        phone.page.get_by_text("Pictures: cat (5 chosen)").wait_for()
        phone.page.get_by_role("button", name="Use these pictures (14)").click()
        phone.start()
        phone.wait_for("finished")
        agent.finish()
        equal_updates(sent, agent)
    model = sample_models.pictures()
    model.load_state_dict({k: torch.from_numpy(v) for k, v in sent["phone", 2].items()})
    first = read_picture(sorted((tmp_path / "pictures" / "cat").iterdir())[0], IMAGES, SHAPE)
    probabilities = model(torch.from_numpy(first)[None]).softmax(1)[0].detach()
    after = phone.view()["predictions"]["after"]
    assert after["name"] == CLASSES[int(probabilities.argmax())]
    assert after["probability"] == pytest.approx(float(probabilities.max()), abs=1e-4)
    said = phone.page.get_by_text(f"{after['name']} ({after['probability']:.0%}) after it")
    said.wait_for()


@pytest.mark.parametrize(
    "spec", ["cp:2.0,penalty=2.0,factor-steps=2,factor-rate=0.001", "slice:4", "width:0.5"]
)
def test_predictions_of_other_families(
    browser, serve, tmp_path: Path, seed: int, spec: str
) -> None:
    """With a personal model from the second round on: before the first there is none."""
    draw = np.random.default_rng(seed)
    for number in range(4):
        (tmp_path / CLASSES[number % 2]).mkdir(exist_ok=True)
        values = draw.integers(256, size=(20, 20, 3), dtype=np.uint8)
        Image.fromarray(values).save(tmp_path / CLASSES[number % 2] / f"{number}.png")
    toml = prepared(tmp_path / "c", PICTURES, SHAPE, kinds={"phone": spec})
    with serve(*toml) as server:
        phone = Phone.opened(browser, server, "phone")
        phone.join("phone")
        for name in CLASSES[:2]:
            files = [str(file) for file in (tmp_path / name).iterdir()]
            phone.page.get_by_label(f"Pictures: {name}").set_input_files(files)
        phone.page.get_by_role("button", name="Use these pictures").click()
        phone.start()
        phone.wait_for("finished")
        predictions = phone.view()["predictions"]
    if spec.startswith("slice"):
        assert predictions is None
        return
    assert predictions["round"] == 2
    assert {predictions["before"]["name"], predictions["after"]["name"]} <= set(CLASSES)
    assert 1 / 3 <= predictions["after"]["probability"] <= 1


@pytest.mark.parametrize("loss", ["contrastive", "own_losses:column"])
def test_labels_that_a_loss_packs(browser, serve, tmp_path: Path, seed: int, loss: str) -> None:
    """The class of a picture, as an integer, without an axis or with one."""
    draw = np.random.default_rng(seed)
    for number in range(9):
        folder = tmp_path / "pictures" / CLASSES[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        values = draw.integers(256, size=(16, 12, 3), dtype=np.uint8)
        Image.fromarray(values).save(folder / f"{number}.png")
    given = {"count": 2, "training": f'loss = "{loss}"'}
    toml, folder = prepared(tmp_path / "c", PICTURES, SHAPE, **given)
    with serve(toml.replace("held_out.npz", str(tmp_path / "pictures")), folder) as server:
        sent = keep_updates(server)
        agent = NativeAgent(server, "phone", tmp_path / "native", tmp_path / "pictures")
        agent.start()
        phone = Phone.opened(browser, server, "phone")
        phone.join("phone")
        for name in CLASSES:
            files = [str(file) for file in sorted((tmp_path / "pictures" / name).iterdir())]
            phone.page.get_by_label(f"Pictures: {name}").set_input_files(files)
        phone.page.get_by_role("button", name="Use these pictures (9)").click()
        phone.start()
        phone.wait_for("finished")
        agent.finish()
        equal_updates(sent, agent)


def test_csv_files(browser, serve, tmp_path: Path, seed: int) -> None:
    """Three files beside an agent. test_page_modules.py compares more of them without a browser."""
    draw = np.random.default_rng(seed)
    (tmp_path / "data").mkdir()
    for file, delimiter in enumerate(",;\t"):
        lines = [delimiter.join(["gz", "gy", '"what"', "gx", "az", "ay", "ax"])]
        for label in draw.permutation(["sit", "walk", "run", "walk"]):
            for row in draw.normal(size=(int(draw.integers(5, 20)), 6)):
                # The second file is that of a German Excel.
                cells = [f"{number:.5g}".replace(".", ".,."[file]) for number in row]
                lines.append(delimiter.join([*cells[:2], label, *cells[2:]]))
        ending = ("\n", "\r\n", "\n")[file]
        text = ending.join(lines) + ending * file
        (tmp_path / "data" / f"{file}.csv").write_bytes(text.encode("utf-8-sig"))
    given = {"model": "sample_models:series_first", "count": 2}
    data = f'{SERIES}\nchannels = "first"'
    with serve(*prepared(tmp_path / "c", data, (6, 7), **given)) as server:
        sent = keep_updates(server)
        agent = NativeAgent(server, "phone", tmp_path / "native", tmp_path / "data")
        agent.start()
        phone = Phone.opened(browser, server, "phone")
        phone.join("phone")
        files = sorted((tmp_path / "data").iterdir(), reverse=True)
        phone.page.get_by_label("Measurements (CSV)").set_input_files([str(file) for file in files])
        phone.start()
        phone.wait_for("finished")
        agent.finish()
        equal_updates(sent, agent)


def test_files_that_cannot_be_used(browser, serve, tmp_path: Path) -> None:
    (tmp_path / "no.png").write_bytes(b"no picture")
    with serve(*prepared(tmp_path / "c", PICTURES, SHAPE)) as server:
        phone = Phone.opened(browser, server, "phone")
        phone.join("phone")
        dog = picture(tmp_path / "one.png", 1)
        phone.page.get_by_label("Pictures: dog").set_input_files([dog, str(tmp_path / "no.png")])
        phone.page.get_by_role("button", name="Use these pictures (1)").click()
        phone.wait_for_problem("data.wrong-shape")
        assert phone.view()["data"] is None
        phone.page.get_by_role("button", name="Use these pictures (1)", disabled=False).wait_for()
        assert token(server, "phone") not in phone.page.content()
        assert_arrays_are_checked(phone, tmp_path)


def assert_arrays_are_checked(phone: Phone, folder: Path) -> None:
    """When they are chosen, not when a round has begun."""
    x, y = np.zeros((4, 3, 16, 12), np.float32), np.zeros(4, np.int64)
    hole = x.copy()
    hole[2, 1] = np.nan
    arrays = {
        "data.wrong-shape": [(x.reshape(4, 12, 16, 3), y), (x, y.astype(np.float32)), (x, y[:3])],
        "data.number-out-of-range": [(hole, y)],
    }
    phone.page.get_by_text("A file with prepared examples").click()
    for code, pairs in arrays.items():
        for wrong_x, wrong_y in pairs:
            np.savez(folder / "a.npz", x=wrong_x, y=wrong_y)
            phone.page.get_by_label("Data file").set_input_files(str(folder / "a.npz"))
            phone.wait_for_problem(code)
            assert phone.page.get_by_role("button", name="Start training").is_disabled()
    phone.page.locator("#data-problem").get_by_text("a.npz: example 2 ").wait_for()


def picture(path: Path, seed: int) -> str:
    values = np.random.default_rng(seed).integers(256, size=(30, 20, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return str(path)


KEPT = """async () => {
  const root = await navigator.storage.getDirectory();
  const folder = await root.getDirectoryHandle("data");
  let count = 0;
  for await (const name of folder.keys()) count++;
  return count;
}"""
"""How many copies of data the page has."""


def test_pictures_are_chosen_taken_out_and_added(browser, serve, tmp_path: Path) -> None:
    """An unreadable one blocks nothing, the same one counts once, and data change in a round."""
    ones = [picture(tmp_path / f"{number}.png", number) for number in range(8)]
    (tmp_path / "again.png").write_bytes(Path(ones[0]).read_bytes())
    (tmp_path / "IMG_7.heic").write_bytes(b"no picture for this browser")
    toml = prepared(tmp_path / "c", PICTURES, SHAPE, epochs=400)
    with serve(*toml) as server:
        records = keep_records(server)
        phone = Phone.opened(browser, server, "phone")
        page = phone.page
        phone.join("phone")
        others = [str(tmp_path / name) for name in ("IMG_7.heic", "again.png")]
        page.get_by_label("Pictures: cat").set_input_files([*ones[:3], *others])
        page.get_by_text("cannot read them: IMG_7.heic").wait_for()
        left_out = page.inner_text("#left-out")
        assert "Left out, because they are already chosen: again.png." in left_out
        page.get_by_label("Pictures: dog").set_input_files(ones[3:6])
        page.get_by_role("button", name="Remove 4.png").click()
        assert page.locator(".small-pictures img").count() == 5
        page.get_by_role("button", name="Use these pictures (5)").click()
        page.get_by_text("5 files: 5 examples").wait_for()
        assert page.get_by_role("button", name="Use these pictures (5)").is_disabled()
        page.reload()
        phone.wait_for("joined")
        page.get_by_label("Keep the examples that are already here").check()
        page.get_by_label("Pictures: owl").set_input_files([ones[0], *ones[6:]])
        page.get_by_role("button", name="Use these pictures (3)").click()
        page.get_by_text("7 files: 7 examples").wait_for()
        assert page.evaluate(KEPT) == 1
        phone.start()
        phone.wait_for("training")
        page.get_by_role("button", name="Change or add data").click()
        page.get_by_label("Pictures: owl").set_input_files(ones[4])
        page.get_by_role("button", name="Use these pictures (4)").click()
        page.get_by_text("8 files: 8 examples").wait_for()
        assert page.evaluate(KEPT) == 2  # the round still trains the older ones
        assert phone.view()["stage"] == "training"
        phone.wait_for("finished")
    assert [record["samples"] for record in records] == [7, 8]


def test_csv_files_that_cannot_be_used(browser, serve, tmp_path: Path) -> None:
    """test_page_modules.py has mistakes of other kinds."""
    head = "ax,ay,az,gx,gy,gz,what"
    with serve(*prepared(tmp_path / "c", SERIES, (7, 6))) as server:
        phone = Phone.opened(browser, server, "phone")
        phone.join("phone")
        mixed = f"{head}\n1.5,2,3,4,5,6,sit\n1:5,2,3,4,5,6,sit\n".replace(",", ";")
        (tmp_path / "a.csv").write_text(mixed.replace(":", ","))
        phone.page.get_by_label("Measurements (CSV)").set_input_files(str(tmp_path / "a.csv"))
        phone.page.get_by_text("a.csv, line 3: ax is “1,5”, but numbers before it").wait_for()
        assert_progress_is_shown(phone, tmp_path, f"{head}\n", "1,2,3,4,5,6,sit\n")


WATCH = """
window.drawn = [];
window.views = [];
new MutationObserver(() => {
  const start = document.getElementById("train");
  window.drawn.push([document.getElementById("data").textContent, start.disabled]);
}).observe(document.getElementById("data"), { childList: true, subtree: true });
"""


def assert_progress_is_shown(phone: Phone, folder: Path, head: str, line: str) -> None:
    """And nothing starts on the old file while a new one is read.

    The worker tells more than the page draws, which is at most one share in a quarter of a second:
    none on a machine that reads the file faster, or that is too busy to draw.
    """
    page = phone.page
    for name, lines in (("old.csv", 30), ("new.csv", 60_000)):
        (folder / name).write_text(head + lines * line)
    page.get_by_label("Measurements (CSV)").set_input_files(str(folder / "old.csv"))
    page.get_by_text("old.csv: 8 examples").wait_for()
    page.evaluate(WATCH)
    page.get_by_label("Measurements (CSV)").set_input_files(str(folder / "new.csv"))
    page.get_by_text("new.csv: 19998 examples").wait_for()
    told = [view["preparing"] for view in page.evaluate("window.views") if view["preparing"]]
    shares = [preparing["done"] / preparing["of"] for preparing in told]
    assert shares == sorted(shares)
    assert len({share for share in shares if 0 < share < 1}) > 10
    *reading, (_, disabled) = page.evaluate("window.drawn")
    known = [f"Reading the data: {share:.0%}" for share in shares]
    assert [text for text, _ in reading] == sorted({text for text, _ in reading}, key=known.index)
    assert all(off for _, off in reading)
    assert not disabled
