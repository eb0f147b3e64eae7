"""Pictures and CSV files as samples, against Pillow's resizing and windows cut in plain Python."""

import itertools
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from device_agent.data.csv_windows import window_starts
from device_agent.data.local_data import LocalData, check_source, load_data
from device_agent.data.pictures import read_picture
from device_agent.formats.label_misfit import misfit_of_labels
from device_agent.formats.label_rule import LabelRule
from device_agent.formats.manifest import Part
from device_agent.formats.preprocessing import Images, Preprocessing, Series, misfit
from exporters.objectives.own_loss_labels import rule_of_parts
from profiles.errors import DataError
from refusals import refused
from toolkit.coordinator.sample_files import read_samples

CLASSES = ("cat", "dog", "owl")
SIZES = [(40, 30), (30, 41), (7, 5), (90, 64)]


def pictures(folder: Path, draw: np.random.Generator, mode: str = "RGB") -> dict[str, list[Path]]:
    """Random pictures of several sizes: two cats, no dog, two owls."""
    images_of: dict[str, list[Path]] = {"cat": [], "owl": []}
    for number, size in enumerate(SIZES):
        name = ("cat", "owl")[number % 2]
        (folder / name).mkdir(parents=True, exist_ok=True)
        file = folder / name / f"{number}.png"
        values = draw.integers(256, size=(*size, len(mode)), dtype=np.uint8)
        Image.fromarray(values.squeeze(), mode).save(file)
        images_of[name].append(file)
    return images_of


def loaded(source: Path, preprocessing: Preprocessing, shape: tuple[int, ...]) -> LocalData:
    labels = LabelRule(len(preprocessing.classes))
    return load_data(str(source), shape, labels, preprocessing=preprocessing)


@pytest.mark.parametrize("fit", ["crop", "stretch"])
@pytest.mark.parametrize("shape", [(3, 16, 12), (3, 20, 20), (1, 8, 8)])
def test_pictures_are_those_of_pillow(
    tmp_path: Path, seed: int, fit: str, shape: tuple[int, ...]
) -> None:
    draw = np.random.default_rng(seed)
    files = pictures(tmp_path, draw)
    mean, std = draw.uniform(size=shape[0]).tolist(), draw.uniform(0.2, 1, shape[0]).tolist()
    images = Images(classes=CLASSES, fit=fit, mean=tuple(mean), std=tuple(std))
    local = loaded(tmp_path, images, shape)
    assert local.y.tolist() == [0, 0, 2, 2]
    height, width = shape[1:]
    for x, file in zip(local.x, [*files["cat"], *files["owl"]], strict=True):
        picture = Image.open(file)
        wide, high = picture.size
        if fit == "crop":
            scale = min(wide / width, high / height)
            left, top = (wide - width * scale) / 2, (high - height * scale) / 2
            box = (left, top, wide - left, high - top)
        else:
            box = (0, 0, wide, high)
        scaled = [
            np.asarray(
                Image.fromarray(np.asarray(channel, np.float32)).resize(
                    (width, height), Image.Resampling.BILINEAR, box
                )
            )
            for channel in picture.split()
        ]
        if shape[0] == 1:
            scaled = [0.299 * scaled[0] + 0.587 * scaled[1] + 0.114 * scaled[2]]
        expected = [(plane / 255 - m) / s for plane, m, s in zip(scaled, mean, std, strict=True)]
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-5)


def test_pictures_stand_upright_and_transparent_points_are_black(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    values = np.zeros((4, 4, 3), np.uint8)
    values[0] = 255
    turned = Image.Exif()
    turned[0x0112] = 3  # upside down
    Image.fromarray(values).save(tmp_path / "cat" / "a.png", exif=turned)
    clear = np.full((4, 4, 4), 255, np.uint8)
    clear[:2, :, 3] = 0
    Image.fromarray(clear).save(tmp_path / "cat" / "b.png")
    deep = np.full((4, 4), 2**15, np.uint16)
    Image.fromarray(deep).save(tmp_path / "cat" / "c.png")
    x = loaded(tmp_path, Images(classes=CLASSES), (3, 4, 4)).x
    assert x[0, 0, :, 0].tolist() == [0, 0, 0, 1]
    assert x[1, 0, :, 0].tolist() == [0, 0, 1, 1]
    assert np.unique(x[2]) == pytest.approx([128 / 255])


SERIES = Series(columns=("ax", "ay"), label="what", classes=("sit", "walk"), step=2)


def csv(file: Path, rows: list[tuple[float, float, str]], delimiter: str = ",") -> None:
    lines = [delimiter.join(map(str, row)) for row in [("ay", "what", "ax"), *rows]]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8-sig")


@pytest.mark.parametrize("channels", ["first", "last"])
def test_windows_of_a_series(tmp_path: Path, seed: int, channels: str) -> None:
    draw = np.random.default_rng(seed)
    expected_x, expected_y = [], []
    for number, delimiter in enumerate(",;\t"):
        counts = [6, *draw.integers(1, 12, size=2)]  # of windows, the first label has two
        labels = np.repeat(["sit", "walk", "sit"], counts).tolist()
        numbers = draw.normal(size=(len(labels), 2)).round(4)
        rows = [(a, label, b) for (a, b), label in zip(numbers.tolist(), labels, strict=True)]
        csv(tmp_path / f"{number}.csv", rows, delimiter)
        begin = 0
        for at in range(1, len(labels) + 1):
            if at == len(labels) or labels[at] != labels[at - 1]:
                for start in range(begin, at - 3, 2):
                    expected_x.append((numbers[start : start + 4, ::-1] - [1, 2]) / [3, 4])
                    expected_y.append(("sit", "walk").index(labels[start]))
                begin = at
    series = msgspec.structs.replace(SERIES, channels=channels, mean=(1, 2), std=(3, 4))
    shape = (2, 4) if channels == "first" else (4, 2)
    local = loaded(tmp_path, series, shape)
    x = np.array(expected_x)
    np.testing.assert_allclose(local.x, x.transpose(0, 2, 1) if channels == "first" else x, 1e-6)
    assert local.y.tolist() == expected_y


def test_a_line_is_a_sample_and_a_regression_has_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,price\n1,2,3.5\n\n-1e1,.5,-4\n")
    series = Series(columns=("a", "b"), label="price")
    rule = LabelRule(None, (1,), "float32")
    local = load_data(tmp_path / "a.csv", (2,), rule, preprocessing=series)
    assert local.x.tolist() == [[1, 2], [-10, 0.5]]
    assert local.y.tolist() == [[3.5], [-4]]
    numbered = Series(columns=("a", "b"), label="n")
    (tmp_path / "a.csv").write_text("a,b,n\n1,2,0\n3,4,2\n")
    local = load_data(tmp_path / "a.csv", (2,), LabelRule(3), preprocessing=numbered)
    assert local.y.tolist() == [0, 2]


@pytest.mark.parametrize(
    "rule",
    [
        LabelRule(3, (1, 1)),
        LabelRule(None, (1,), "float32", parts=(Part(name="", shape=(1, 1), dtype="int64"),)),
    ],
)
def test_a_picture_has_its_label_in_the_shape_that_the_loss_takes(
    tmp_path: Path, rule: LabelRule, seed: int
) -> None:
    pictures(tmp_path / "p", np.random.default_rng(seed))
    images = Images(classes=CLASSES)
    y = load_data(tmp_path / "p", (3, 4, 4), rule, preprocessing=images).y
    assert y.shape == (4, *(rule.shape or ()))
    assert y.ravel().tolist() == [0, 0, 2, 2]
    if rule.parts:  # the shape of other rules is not known before the model is
        held_out = read_samples(tmp_path / "p", (3, 4, 4), rule, preprocessing=images)[1]
        np.testing.assert_array_equal(held_out, y)


def test_numbers_of_an_own_loss_may_have_no_axis(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,price\n1,3.5\n-1,-4\n")
    rule = rule_of_parts((Part(name="", shape=()),))
    series = Series(columns=("a",), label="price")
    _, y = read_samples(tmp_path / "a.csv", (1,), rule, preprocessing=series)
    assert y.tolist() == [[3.5], [-4]]


def test_named_labels_are_arrays() -> None:
    labels = rule_of_parts((Part(name="kind", shape=(), dtype="int64", limit=3),))
    said = misfit_of_labels(Images(classes=CLASSES), labels, (3, 8, 8), "float32")
    assert said == "its loss takes labels by name, which only arrays can have: y_kind"


@given(
    label=st.lists(st.integers(0, 2), min_size=1, max_size=30).map(np.array),
    length=st.integers(1, 5),
    step=st.integers(1, 6),
)
@settings(max_examples=200, deadline=None)
def test_windows_have_one_label_and_follow_one_another(
    label: np.ndarray, length: int, step: int
) -> None:
    starts = window_starts(label, length, step, runs=True)
    expected, begin = [], 0
    for _, run in itertools.groupby(label.tolist()):
        end = begin + len(list(run))
        expected += range(begin, end - length + 1, step)
        begin = end
    assert starts.tolist() == expected


def test_large_samples_go_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    pictures(tmp_path / "pictures", draw)
    images = Images(classes=CLASSES)
    expected = loaded(tmp_path / "pictures", images, (3, 9, 9))
    monkeypatch.setattr("device_agent.data.preparation.IN_MEMORY_BYTES", 100)
    labels = LabelRule(3)
    local = load_data(
        str(tmp_path / "pictures"),
        *((3, 9, 9), labels),
        unpack_to=tmp_path / "to",
        preprocessing=images,
    )
    assert (tmp_path / "to" / "x.prepared.npy").exists()
    np.testing.assert_array_equal(local.x, expected.x)
    assert local.fingerprint == expected.fingerprint


def test_what_cannot_be_prepared(tmp_path: Path) -> None:
    images = Images(classes=CLASSES)
    pictures(tmp_path / "p", np.random.default_rng(0))
    shape, labels = (3, 8, 8), LabelRule(3)

    def load(source: Path, preprocessing: Preprocessing | None) -> LocalData:
        return load_data(source, shape, labels, preprocessing=preprocessing)

    with refused("data.not-prepared"):
        load(tmp_path / "p", None)
    (tmp_path / "p" / "dgo").mkdir()
    with refused("data.unknown-class", "did you mean 'dog'?", name="dgo"):
        load(tmp_path / "p", images)
    (tmp_path / "p" / "dgo").rename(tmp_path / "p" / "dog")
    (tmp_path / "p" / "dog" / "x.jpg").write_bytes(b"no picture")
    with refused("data.unreadable-file"):
        load(tmp_path / "p", images)
    (tmp_path / "p" / "dog" / "x.jpg").rename(tmp_path / "p" / "x.jpg")
    with refused("data.unknown-class", name="x.jpg"):
        load(tmp_path / "p", images)
    csv(tmp_path / "a.csv", [(1, "sit", 2)] * 9)
    with refused("data.wrong-kind"):
        load(tmp_path / "a.csv", images)
    with refused("data.wrong-kind"):
        load(tmp_path / "p", SERIES)
    (tmp_path / "empty").mkdir()
    with refused("data.missing-file"):
        load(tmp_path / "empty", images)
    with refused("data.missing-file"):
        check_source(str(tmp_path / "no.csv"))
    check_source(str(tmp_path / "p"))


def test_pictures_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures(tmp_path, np.random.default_rng(0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused("program.missing-package", package="pillow"):
        check_source(str(tmp_path))
    with refused("program.missing-package", package="pillow"):
        loaded(tmp_path, Images(classes=CLASSES), (3, 8, 8))


def test_damaged_pictures_are_named(tmp_path: Path, seed: int) -> None:
    """Whatever a decoder raises, the owner reads which picture it is."""
    draw = np.random.default_rng(seed)
    images = Images(classes=CLASSES)
    turned = Image.Exif()
    turned[0x0112] = 6
    values = draw.integers(256, size=(24, 24, 3), dtype=np.uint8)
    for suffix in ("jpg", "png", "webp", "gif", "tiff"):
        Image.fromarray(values).save(tmp_path / f"whole.{suffix}", exif=turned)
        whole = (tmp_path / f"whole.{suffix}").read_bytes()
        for _ in range(60):
            data = bytearray(whole)
            for position in draw.integers(len(data), size=int(draw.integers(1, 5))):
                data[position] = draw.integers(256)
            file = tmp_path / f"damaged.{suffix}"
            file.write_bytes(data[: int(draw.integers(1, len(data) + 1))])
            try:
                shape = read_picture(file, images, (3, 8, 8)).shape
            except DataError as error:
                shape = error.values["path"]
            assert shape in ((3, 8, 8), str(file))


def test_what_is_no_file_and_values_without_a_range(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    os.mkfifo(tmp_path / "cat" / "pipe.png")
    with refused("data.unreadable-file", "it is not a file"):
        loaded(tmp_path, Images(classes=CLASSES), (3, 4, 4))
    (tmp_path / "cat" / "pipe.png").unlink()
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "cat" / "a.tiff")
    with refused("data.unreadable-file", "its values have no known range"):
        loaded(tmp_path, Images(classes=CLASSES), (3, 4, 4))


def test_accents_may_be_written_in_two_ways(tmp_path: Path) -> None:
    name = "do\u0308g"
    (tmp_path / "pictures" / name).mkdir(parents=True)
    for number in range(2):
        picture = Image.fromarray(np.zeros((4, 4, 3), np.uint8))
        picture.save(tmp_path / "pictures" / name / f"{number}.png")
    local = loaded(tmp_path / "pictures", Images(classes=("cat", "d\u00f6g")), (3, 4, 4))
    assert local.y.tolist() == [1, 1]
    (tmp_path / "a.csv").write_text(f"o\u0308,y\n1,{name}\n2,{name}\n")
    series = Series(columns=("\u00f6",), label="y", classes=("cat", "d\u00f6g"))
    assert loaded(tmp_path / "a.csv", series, (1,)).y.tolist() == [1, 1]


def test_decimal_commas_where_no_comma_separates(tmp_path: Path) -> None:
    for number, (mark, delimiter) in enumerate([(".", ","), (",", ";"), (",", "\t")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        rows = [(f"{0.25 * line:.2f}".replace(".", mark), "7", "sit") for line in range(-3, 5)]
        text = "\n".join(delimiter.join(row) for row in [("ax", "ay", "what"), *rows])
        (folder / "a.csv").write_text(text)
        numbers = loaded(folder / "a.csv", SERIES, (1, 2)).x
        assert np.asarray(numbers)[:, 0].tolist() == [[0.25 * line, 7] for line in range(-3, 5, 2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ax;ay;what\n1,5;2.5;sit\n", "line 2: ay is '2.5', but numbers before it"),
        ("ax;ay;what\n1.5;2;sit\n3;4,5;sit\n", "line 3: ay is '4,5', but numbers before it"),
        ("ax;ay;what\n1.234,5;2;sit\n", "line 2: ax is '1.234,5'; it must be a number"),
        ('ax,ay,what\n"1,5",2,sit\n', "line 2: ax is '1,5'; it must be a number"),
    ],
)
def test_decimal_marks_that_could_be_misread(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with refused("data.not-a-number", words):
        loaded(tmp_path / "a.csv", SERIES, (1, 2))


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("ax,ay\n1,2\n", "data.missing-column", "no column 'what'. Its columns are ax, ay."),
        ("ax,ay,What\n", "data.missing-column", "did you mean 'What'?"),
        ("ax,ay,what\n1,,sit\n", "data.not-a-number", "line 2: ay is ''"),
        ("ax,ay,what\n1,1,sit\n1,1_0,sit\n", "data.not-a-number", "line 3: ay is '1_0'"),
        ("ax,ay,what\nnan,1,sit\n", "data.not-a-number", "ax is 'nan'"),
        ("ax,ay,what\n1,1e39,sit\n", "data.not-a-number", "ay is '1e39'"),
        ("ax,ay,what\n1,1,run\n", "data.unknown-class", "line 2: the model has no class 'run'"),
        ("ax,ay,what\n1,1,sit\n", "data.too-few-samples", "1 sample"),
        ("ax,ay,what\n", "data.too-few-samples", "A sample is a window of 1 line with the same"),
        ("", "data.missing-column", "no column 'ax'. Its first line is empty."),
        ("AX,ay,what\n", "data.missing-column", "did you mean 'AX'?"),
        ("ax,ay,what,ax\n1,1,sit,2\n", "data.missing-column", "has 2 columns 'ax'."),
        ('ax,ay,what,n\n1,1,sit,"x\n1,1,sit,x\n', "data.unreadable-file", "not a CSV file"),
        ("ax,ay,what\n\n\n1,1,sit\n\n1,x,sit\n", "data.not-a-number", "line 6: ay is 'x'"),
        ("ax,ay,what\n\u0661,1,sit\n", "data.not-a-number", "line 2: ax is"),
    ],
)
def test_mistakes_in_a_csv_file(tmp_path: Path, text: str, code: str, words: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with refused(code, words):
        loaded(tmp_path / "a.csv", SERIES, (1, 2))


@pytest.mark.parametrize(
    ("preprocessing", "shape", "more", "reason"),
    [
        (Images(classes=CLASSES), (3, 8, 8), {"classes": 3}, None),
        (Images(classes=CLASSES), (3, 8, 8), {"classes": 4}, "names 3 classes"),
        (Images(classes=CLASSES), (2, 8, 8), {}, "(3, h, w)"),
        (Images(classes=CLASSES, mean=(0.5,)), (3, 8, 8), {}, "mean needs 3 numbers"),
        (Images(classes=("a", "a")), (3, 8, 8), {}, "named twice"),
        (Images(classes=(".a", "b")), (3, 8, 8), {}, "cannot be the name"),
        (Images(classes=CLASSES), (3, 8, 8), {"regression": True}, "has no classes"),
        (Images(classes=CLASSES), (3, 8, 8), {"labels": (8, 8)}, "labels (8, 8)"),
        (Images(classes=CLASSES), (3, 8, 8), {"dtype": "int64"}, "takes int64"),
        (SERIES, (2,), {}, None),
        (SERIES, (9, 2), {"labels": (1,)}, None),
        (SERIES, (2, 9), {}, "samples (2,) or (lines, 2)"),
        (SERIES, (2, 9), {}, 'With channels = "first" they fit'),
        (Series(columns=("a",), label="a"), (1,), {}, "cannot be both the label and part of"),
    ],
)
def test_what_fits_a_model(
    preprocessing: Preprocessing, shape: tuple[int, ...], more: dict, reason: str | None
) -> None:
    said = misfit(preprocessing, shape, **{"dtype": "float32", **more})
    assert said is None if reason is None else reason in str(said)
