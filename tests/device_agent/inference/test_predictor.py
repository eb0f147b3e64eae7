"""Predictions on a device compared with plain PyTorch."""

import threading
from pathlib import Path
from weakref import WeakSet

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import nn

import bundles
from device_agent.formats.manifest import uploaded
from device_agent.formats.preprocessing import Images, Series
from device_agent.inference import predictor as predictor_module
from device_agent.inference.predictor import Predictor, Tensors
from device_agent.runtime.onnx_runtime import OnnxSession
from device_agent.training.standalone_training import train
from edgetailor import deploy
from exporters.export import Format, export
from exporters.programs.program import inference_program, with_preprocessing
from log_messages import logged
from parameters import needs_litert
from refusals import refused
from toolkit.families import family_named
from toolkit.splitting import split
from toolkit.submodels.global_model import from_model
from toolkit.submodels.hyperparameters import Loss, TrainingConfig
from toolkit.submodels.matrix_product import Product

TOLERANCE = 1e-5


def softmax_of(module: nn.Module, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return torch.softmax(module.eval()(torch.from_numpy(x)), 1).numpy()


def dense_model(spec: str) -> nn.Module:
    """The tiny model with the dense weights for which the tensors of a bundle stand."""
    model, source = bundles.tiny_model()
    submodel = split(model, spec, bundles.SAMPLE_SHAPE, bundles.TRAINING)
    values = submodel.cut(source)
    table = uploaded(submodel.program.tensors)
    shapes = {name: tuple(value.shape) for name, value in source.tensors.items()}
    tensors = {entry.name: values[entry.name] for entry in table}
    held = family_named(submodel.spec.family).recover(tensors, table, shapes)
    dense = {n: v.dense() if isinstance(v, Product) else v for n, v in held.items()}
    model.load_state_dict({**source.tensors, **dense})
    return model


@pytest.mark.parametrize("family", bundles.FAMILIES)
def test_every_family_predicts_as_pytorch(
    family: str, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    predictor = Predictor(bundles.tiny_bundle(tmp_path_factory, family), threads=1)
    x, _ = bundles.samples(70, seed)  # more than are predicted at once
    expected = softmax_of(dense_model(bundles.FAMILIES[family]), x)
    np.testing.assert_allclose(predictor.predict(x), expected, atol=TOLERANCE)
    assert predictor.classes == tuple(map(str, range(bundles.CLASSES)))
    assert predictor.predicted_bytes is not None
    assert predictor.predicted_bytes > 0


@pytest.mark.parametrize(("spec", "format"), [("pfedme", "onnx"), ("slice:classifier", "tflite")])
def test_other_bundles_predict_as_pytorch(
    spec: str, format: Format, tmp_path: Path, seed: int
) -> None:
    needs_litert(format)
    model, source = bundles.tiny_model()
    submodel = split(model, spec, bundles.SAMPLE_SHAPE, bundles.TRAINING)
    export(
        submodel.program,
        submodel.cut(source),
        tmp_path / "b",
        format=format,
        base="0" * 64,
        check=False,
    )
    x, _ = bundles.samples(9, seed)
    np.testing.assert_allclose(
        Predictor(tmp_path / "b").predict(x), softmax_of(model, x), atol=TOLERANCE
    )


@pytest.mark.parametrize("format", ["onnx", "tflite"])
def test_an_inference_bundle_predicts_as_pytorch(format: Format, tmp_path: Path, seed: int) -> None:
    needs_litert(format)
    model, _ = bundles.tiny_model()
    deployed = deploy(
        model, "slice:classifier", bundles.SAMPLE_SHAPE, tmp_path / "b", format=format
    )
    x, _ = bundles.samples(70, seed)
    predictor = Predictor(deployed.out, threads=1)
    np.testing.assert_allclose(predictor.predict(x), softmax_of(model, x), atol=TOLERANCE)
    with refused("bundle.no-training"):
        train(deployed.out, bundles.samples(9, seed), tmp_path / "update")


def test_a_personal_model_predicts_with_its_own_statistics(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    bundle = bundles.tiny_bundle(tmp_path_factory, "cp")
    data, own = bundles.write_data(tmp_path / "data.npz", seed=seed), tmp_path / "own.safetensors"
    train(bundle, str(data), tmp_path / "update", personal=own)
    file = load_file(own)
    state = {name.removeprefix("personal:"): torch.from_numpy(a) for name, a in file.items()}
    model, _ = bundles.tiny_model()
    model.load_state_dict(state, strict=True)  # statistics, too
    x, _ = bundles.samples(9, seed)
    found = Predictor(bundle, personal=own).predict(x)
    np.testing.assert_allclose(found, softmax_of(model, x), atol=TOLERANCE)
    assert np.abs(found - Predictor(bundle).predict(x)).max() > 1e-3
    trained = load_file(tmp_path / "update" / "update.safetensors")
    for name, value in trained.items():
        if name.endswith(("running_mean", "running_var")):
            np.testing.assert_array_equal(value, file[name])


def test_a_personal_model_without_statistics_predicts_with_those_of_the_bundle(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Files of earlier versions have none."""
    bundle = bundles.tiny_bundle(tmp_path_factory, "cp")
    data, own = bundles.write_data(tmp_path / "data.npz", seed=seed), tmp_path / "own.safetensors"
    train(bundle, str(data), tmp_path / "update", personal=own)
    with safe_open(own, framework="numpy") as file:
        about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    personal = {name: array for name, array in tensors.items() if name.startswith("personal:")}
    save_file(personal, own, metadata=about)
    x, _ = bundles.samples(9, seed)
    model, source = bundles.tiny_model()
    state = {name.removeprefix("personal:"): torch.from_numpy(a) for name, a in personal.items()}
    model.load_state_dict({**source.tensors, **state})
    with logged() as messages:
        found = Predictor(bundle, personal=own).predict(x)
    np.testing.assert_allclose(found, softmax_of(model, x), atol=TOLERANCE)
    assert [m for m in messages if "no statistics of its own" in m]


def test_pictures_need_no_folders_of_classes(tmp_path: Path, seed: int) -> None:
    names = ("ash", "birch", "cedar")
    model = bundles.picture_bundle(
        tmp_path / "b", Images(classes=names, mean=(0.5,), std=(0.25,)), (1, 4, 4)
    )
    grey = np.random.default_rng(seed).integers(0, 256, (2, 4, 4), np.uint8)
    (tmp_path / "pictures" / "unsorted").mkdir(parents=True)
    for number, place in enumerate(("b.png", "unsorted/a.png")):
        Image.fromarray(grey[number]).save(tmp_path / "pictures" / place)
    predictor = Predictor(tmp_path / "b")
    found = list(predictor.predict_files(tmp_path / "pictures"))
    expected = softmax_of(model, (grey[:, None] / np.float32(255) - 0.5) / np.float32(0.25))
    assert [prediction.file for prediction in found] == ["b.png", "unsorted/a.png"]
    np.testing.assert_allclose([p.values for p in found], expected, atol=TOLERANCE)
    assert predictor.classes == names
    assert predictor.describe(found[0].values).split()[0] == names[expected[0].argmax()]


@pytest.mark.parametrize("labelled", [True, False])
def test_windows_of_a_csv_file_need_no_labels(tmp_path: Path, seed: int, labelled: bool) -> None:
    series = Series(columns=("a", "b"), label="kind", mean=(1.0, 0.0), std=(2.0, 1.0))
    model = bundles.picture_bundle(tmp_path / "b", series, (3, 2))
    numbers = np.random.default_rng(seed).normal(size=(7, 2)).astype(np.float32)
    head = "b,kind,a" if labelled else "b,a"
    rows = [f"{b},{'?,' if labelled else ''}{a}" for a, b in numbers.tolist()]
    (tmp_path / "data.csv").write_text("\n".join([head, *rows]) + "\n")
    found = list(Predictor(tmp_path / "b").predict_files(tmp_path / "data.csv"))
    windows = ((numbers - [1, 0]) / [2, 1]).astype(np.float32)[:6].reshape(2, 3, 2)
    expected = softmax_of(model, windows)
    assert [p.file for p in found] == ["data.csv, window 1", "data.csv, window 2"]
    np.testing.assert_allclose([p.values for p in found], expected, atol=TOLERANCE)


def exported(model: nn.Module, shape: tuple[int, ...], out: Path, loss: Loss) -> Predictor:
    submodel = split(model, "full", shape, TrainingConfig(batch_size=4, loss=loss))
    values = submodel.cut(from_model(model))
    export(submodel.program, values, out, base="0" * 64, check=False)
    return Predictor(out, threads=1)


def result_of(model: nn.Module, x: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(torch.from_numpy(x))
    return result


def test_two_classes_with_one_output(tmp_path: Path, seed: int) -> None:
    model = nn.Linear(6, 1)
    x = np.random.default_rng(seed).normal(size=(5, 6)).astype(np.float32)
    found = exported(model, (6,), tmp_path / "b", "cross-entropy").predict(x)
    np.testing.assert_allclose(
        found[:, 1], torch.sigmoid(result_of(model, x))[:, 0], atol=TOLERANCE
    )
    np.testing.assert_allclose(found.sum(1), 1, atol=TOLERANCE)


@pytest.mark.parametrize("predicts_only", [True, False])
def test_pictures_of_two_classes_for_an_output_without_a_class_axis(
    tmp_path: Path, predicts_only: bool
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 1), nn.Flatten(0))
    names, training = ("ash", "birch"), TrainingConfig(loss="binary-cross-entropy")
    submodel = split(model, "full", (1, 4, 4), training)
    program = with_preprocessing(submodel.program, Images(classes=names))
    if predicts_only:
        program = inference_program(program)
    values = submodel.cut(from_model(model))
    read = {entry.name for entry in program.tensors}
    own = {name: value for name, value in values.items() if name in read}
    export(program, own, tmp_path / "b", base="0" * 64, check=False)
    predictor = Predictor(tmp_path / "b", threads=1)
    assert (predictor.meaning, predictor.classes) == ("sigmoid", names)


def test_a_regression_returns_its_numbers(tmp_path: Path, seed: int) -> None:
    model = nn.Linear(6, 2)
    x = np.random.default_rng(seed).normal(size=(5, 6)).astype(np.float32)
    predictor = exported(model, (6,), tmp_path / "b", "mse")
    np.testing.assert_allclose(predictor.predict(x), result_of(model, x), atol=TOLERANCE)
    assert (predictor.classes, predictor.meaning) == ((), "numbers")


def test_points_of_an_image_keep_their_positions(tmp_path: Path, seed: int) -> None:
    model = nn.Conv2d(2, 3, 1)
    x = np.random.default_rng(seed).normal(size=(5, 2, 4, 6)).astype(np.float32)
    found = exported(model, (2, 4, 6), tmp_path / "b", "cross-entropy").predict(x)
    np.testing.assert_allclose(found, torch.softmax(result_of(model, x), 1), atol=TOLERANCE)


def test_labels_of_a_ctc_model(tmp_path: Path, seed: int) -> None:
    model = nn.Linear(4, 4)
    nn.init.eye_(model.weight)
    nn.init.zeros_(model.bias)
    predictor = exported(model, (7, 4), tmp_path / "b", "ctc")
    said = [0, 3, 3, 0, 3, 1, 0]
    found = predictor.predict(9 * np.eye(4, dtype=np.float32)[said][None])
    np.testing.assert_allclose(
        found, torch.softmax(9 * torch.eye(4)[said], 1)[None], atol=TOLERANCE
    )
    assert predictor.decode(found[0]) == ["3", "3", "1"]


class Counts(nn.Module):
    """Counts the words of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts: torch.Tensor = self.words(x).sum(1)
        return counts


def test_words_may_be_int32_as_in_training(tmp_path: Path, seed: int) -> None:
    submodel = split(model := Counts(), "full", sample_shape=(4,))
    values = submodel.cut(from_model(model))
    export(submodel.program, values, tmp_path / "b", base="0" * 64, check=False)
    x = np.random.default_rng(seed).integers(0, 2, (3, 4), np.int32)
    np.save(tmp_path / "x.npy", x)
    found = [p.values for p in Predictor(tmp_path / "b").predict_files(tmp_path / "x.npy")]
    expected = torch.softmax(result_of(model, x.astype(np.int64)), 1)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_never_more_samples_at_once_than_the_memory_is_predicted_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    sizes = []
    run = OnnxSession.run

    def counted(self: OnnxSession, feeds: Tensors, over: None = None) -> Tensors:
        sizes.append(len(feeds["x"]))
        return run(self, feeds, over)

    monkeypatch.setattr(OnnxSession, "run", counted)
    monkeypatch.setattr(predictor_module, "CHUNK", 2 * bundles.BATCH)
    x, _ = bundles.samples(21, seed)
    bundle = bundles.tiny_bundle(tmp_path_factory, "full")
    found = Predictor(bundle, threads=1).predict(x)
    model, _ = bundles.tiny_model()
    np.testing.assert_allclose(found, softmax_of(model, x), atol=TOLERANCE)
    assert sum(sizes) == 21
    assert max(sizes) == bundles.BATCH


def test_a_slice_has_one_stage_in_memory_if_more_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    sessions: WeakSet[OnnxSession] = WeakSet()
    most = []
    begin = OnnxSession.__init__

    def counted(self: OnnxSession, graph: Path, threads: int) -> None:
        most.append(len(sessions))
        begin(self, graph, threads)
        sessions.add(self)

    monkeypatch.setattr(OnnxSession, "__init__", counted)
    monkeypatch.setattr(Predictor, "_fits", lambda *_: False)
    predictor = Predictor(bundles.tiny_bundle(tmp_path_factory, "slice"), max_memory=1 << 40)
    x, _ = bundles.samples(70, seed)
    expected = softmax_of(dense_model(bundles.FAMILIES["slice"]), x)
    np.testing.assert_allclose(predictor.predict(x), expected, atol=TOLERANCE)
    assert set(most) == {0}
    assert len(most) > 2


def test_threads_share_a_predictor(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    predictor = Predictor(bundles.tiny_bundle(tmp_path_factory, "full"), threads=1)
    x, _ = bundles.samples(30, seed)
    expected, found = predictor.predict(x), dict[int, np.ndarray]()
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: predictor.predict(x[i : i + 5])}))
        for i in range(0, 30, 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(
        np.concatenate([found[i] for i in sorted(found)]), expected, atol=1e-6
    )
