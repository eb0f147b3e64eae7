"""Several arrays of samples or labels: packed into one, from every kind of source."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from device_agent.data import array_files, packed_arrays
from device_agent.data.local_data import LocalData, check_source, load_data
from device_agent.formats.label_rule import LabelRule
from device_agent.formats.manifest import Part
from device_agent.formats.packing import LARGEST_ID, pack, packed_size, unpack
from refusals import refused

X_PARTS = (Part(name="wave", shape=(2, 3)), Part(name="word", shape=(2,), dtype="int64", limit=9))
Y_PARTS = (Part(name="kind", shape=(), dtype="int64", limit=3), Part(name="box", shape=(4,)))
LABELS = LabelRule(None, (5,), "float32", parts=Y_PARTS)
Arrays = dict[str, np.ndarray]


def arrays(seed: int = 0, n: int = 7) -> tuple[Arrays, Arrays]:
    draw = np.random.default_rng(seed)
    x = {
        "wave": draw.standard_normal((n, 2, 3), dtype=np.float32),
        "word": draw.integers(9, size=(n, 2)),
    }
    y = {"kind": draw.integers(3, size=n), "box": draw.random((n, 4), dtype=np.float32)}
    return x, y


def named(x: Arrays, y: Arrays) -> Arrays:
    return {f"x_{k}": v for k, v in x.items()} | {f"y_{k}": v for k, v in y.items()}


def load(source: object, to: Path | None = None) -> LocalData:
    return load_data(source, (8,), LABELS, parts=X_PARTS, unpack_to=to)  # type: ignore[arg-type]


def as_npz(folder: Path, x: Arrays, y: Arrays) -> object:
    np.savez(folder / "local.npz", **named(x, y))  # type: ignore[arg-type]
    return folder / "local.npz"


def as_folder(folder: Path, x: Arrays, y: Arrays) -> object:
    for name, array in named(x, y).items():
        np.save(folder / f"{name}.npy", array)
    return folder


def as_function(folder: Path, x: Arrays, y: Arrays) -> object:
    as_npz(folder, x, y)
    (folder / "packed_source.py").write_text(
        "import numpy as np\n"
        f"file = np.load({str(folder / 'local.npz')!r})\n"
        "def data():\n"
        "    return tuple({n[2:]: file[n] for n in file if n[0] == side} for side in 'xy')\n"
    )
    return "packed_source:data"


SOURCES: dict[str, Callable[[Path, Arrays, Arrays], object]] = {
    "npz": as_npz,
    "folder": as_folder,
    "function": as_function,
    "pair": lambda _, x, y: (x, y),
    "mapping": lambda _, x, y: {"x": x, "y": y},
    "flat mapping": lambda _, x, y: named(x, y),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_same_columns(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "packed_source", raising=False)
    x, y = arrays()
    source = SOURCES[kind](tmp_path, x, y)
    if isinstance(source, str | Path):
        check_source(str(source))
    local = load(source)
    wave, word = x["wave"].reshape(7, 6), x["word"].astype(np.float32)
    np.testing.assert_array_equal(local.x, np.hstack((wave, word)))
    np.testing.assert_array_equal(local.y, np.hstack((y["kind"][:, None], y["box"])))
    assert (local.x.dtype, local.y.dtype) == (np.float32, np.float32)
    assert local.fingerprint == load((x, y)).fingerprint


def test_a_large_array_is_packed_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = arrays(n=300)
    monkeypatch.setattr(packed_arrays, "IN_MEMORY_BYTES", 64)
    monkeypatch.setattr(array_files, "PIECE_BYTES", 1000)
    local = load(as_npz(tmp_path, x, y), tmp_path / "unpacked")
    assert len(local.mapped) == 2
    np.testing.assert_array_equal(local.x, pack(x, X_PARTS))
    np.testing.assert_array_equal(local.labels(np.array([5, 299])), pack(y, Y_PARTS)[[5, 299]])


def test_unpacking_returns_shapes_and_types() -> None:
    x, _ = arrays()
    parts = unpack(pack(x, X_PARTS), X_PARTS)
    assert packed_size(X_PARTS) == 8
    for name, array in x.items():
        np.testing.assert_array_equal(parts[name], array)
        assert parts[name].dtype == array.dtype


def test_a_packed_array_of_one_part_has_the_plain_name() -> None:
    x, _ = arrays()
    mask = np.random.default_rng(1).integers(4, size=(7, 2, 2))
    mask[0] = -100  # positions may be ignored
    labels = LabelRule(
        None, (4,), "float32", parts=(Part(name="", shape=(2, 2), dtype="int64", limit=4),)
    )
    local = load_data((x["wave"], mask), (2, 3), labels)
    np.testing.assert_array_equal(local.y, mask.reshape(7, 4).astype(np.float32))


def changed(side: str, name: str, change: Callable[[np.ndarray], object]) -> object:
    x, y = arrays()
    own = x if side == "x" else y
    own[name] = change(own[name])  # type: ignore[assignment]
    return x, y


def holding(value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array.flat[1] = value
        return array

    return change


@pytest.mark.parametrize(
    ("source", "code", "name"),
    [
        (lambda: (arrays()[0], arrays()[1]["kind"]), "data.missing-array", "y"),
        (lambda: ({"wave": arrays()[0]["wave"]}, arrays()[1]), "data.missing-array", "x"),
        (lambda: changed("x", "wave", lambda a: a.astype(float)), "data.wrong-type", "x_wave"),
        (lambda: changed("y", "kind", lambda a: a.astype("f4")), "data.wrong-type", "y_kind"),
        (lambda: changed("y", "box", lambda a: a[:, :3]), "data.wrong-shape", "y_box"),
        (lambda: changed("y", "box", lambda a: a[:5]), "data.wrong-shape", "y_box"),
        (lambda: changed("y", "kind", list), "data.not-an-array", "y_kind"),
        (lambda: changed("x", "word", holding(9)), "data.number-out-of-range", "x_word"),
        (lambda: changed("y", "kind", holding(-100)), "data.number-out-of-range", "y_kind"),
    ],
)
def test_what_does_not_fit_is_refused(source: Callable[[], object], code: str, name: str) -> None:
    with refused(code, array=name):
        load(source())


def test_numbers_that_are_not_finite_are_refused() -> None:
    with refused("data.not-finite"):
        load(changed("y", "box", lambda a: np.where(a == a[2, 1], np.float32(np.nan), a)))


def test_a_mapping_may_name_the_arrays_of_labels_but_not_those_of_samples() -> None:
    x, y = arrays()
    expected = load((x, y))
    mixed = {"x": x, **{f"y_{name}": array for name, array in y.items()}}
    np.testing.assert_array_equal(load(mixed).y, expected.y)
    del mixed["y_box"]
    with refused("data.missing-array", array="y_box") as caught:
        load(mixed)
    wanted = "data has no array 'y_box'. It must contain "
    names = [*(f"x_{name}" for name in x), *(f"y_{name}" for name in y)]
    assert str(caught.value) == f"{wanted}{' and '.join(names)}."


@pytest.mark.parametrize(
    ("side", "name", "value", "advice"),
    [
        ("x", "word", 9, "Correct it, or use a model that takes more ids."),
        ("x", "word", -1, "Leave such samples out."),
        ("y", "kind", 9, "Correct it, or use a model and a loss with more classes."),
    ],
)
def test_what_to_do_about_an_integer_out_of_range(
    side: str, name: str, value: int, advice: str
) -> None:
    with refused("data.number-out-of-range", number=value) as caught:
        load(changed(side, name, holding(value)))
    assert str(caught.value).endswith(advice)


@pytest.mark.parametrize("value", [-1, LARGEST_ID])
def test_classes_of_which_only_equality_counts_can_be_numbered(value: int) -> None:
    rule = LabelRule(None, (1,), "float32", parts=(Part(name="", shape=(), dtype="int64"),))
    x, y = np.zeros((3, 2), np.float32), np.array([value, 7, value])
    with refused("data.number-out-of-range", number=value) as caught:
        load_data((x, y), (2,), rule)
    advice = str(caught.value).rpartition("from 0: ")[2].removesuffix(".")
    assert advice == "numpy.unique(y, return_inverse=True)[1]"
    numbered = np.unique(y, return_inverse=True)[1]
    own = load_data((x, numbered), (2,), rule).y
    assert own[0] == own[2] != own[1]


def test_the_check_at_the_start_and_the_loader_take_the_same_types(tmp_path: Path) -> None:
    x, y = arrays()
    own = as_npz(tmp_path, {**x, "word": x["word"].astype(np.int32)}, y)
    check_source(str(own))
    np.testing.assert_array_equal(load(own).x, load((x, y)).x)
    own = as_npz(tmp_path, x, {**y, "kind": y["kind"].astype(np.int32)})
    with refused("data.wrong-type", y="y_kind"):
        check_source(str(own))
    with refused("data.wrong-type", array="y_kind"):
        load(own)


def test_an_id_that_float32_does_not_hold_is_refused() -> None:
    part = (Part(name="id", shape=(1,), dtype="int64"),)
    ids = np.array([[LARGEST_ID - 1], [LARGEST_ID]])
    with refused(
        "data.number-out-of-range", sample=1, highest=LARGEST_ID - 1, advice="Correct it."
    ):
        load_data(({"id": ids}, np.zeros(2, np.int64)), (1,), LabelRule(2), parts=part)


def test_a_file_that_lacks_an_array(tmp_path: Path) -> None:
    x, y = arrays()
    del y["box"]
    with refused("data.missing-array", array="y_box"):
        load(as_npz(tmp_path, x, y))
