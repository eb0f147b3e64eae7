"""Modules of the page beside numpy and the agent: the same numbers of the same files."""

import base64
import io
import itertools
import json
import random
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
import torch
from google.protobuf.internal import encoder
from torch import nn

import own_losses
from device_agent.data.csv_windows import windows_of
from device_agent.federation.identity.trusted_key import new_key
from device_agent.formats.bundle import open_bundle, structure
from device_agent.formats.evaluation_counts import (
    EvaluationCounts,
    EvaluationRequest,
    finite_counts,
)
from device_agent.formats.preprocessing import Series
from device_agent.formats.protocol.joining import Invitation
from device_agent.formats.protocol.releases import ReleaseOffer
from device_agent.formats.protocol.rounds import Work
from device_agent.formats.protocol.transfers import FileOffer
from edgetailor import TrainingConfig, pack_inputs, set_input_range, split
from exporters.export import export
from models_for_tests import two_towers
from page_modules import run_with
from profiles.errors import TrustError
from refusals import refused
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey
from toolkit.submodels.global_model import from_model
from unsafe_graphs import UNSAFE

pytestmark = pytest.mark.web

HALVES = """
const [numbers, halves, beyond] = given;
const read = (path) => new Uint8Array(readFileSync(path)).buffer;
writeFileSync(`${numbers}.half`, page.toHalf(new Float32Array(read(numbers))));
writeFileSync(`${halves}.float`, page.fromHalf(new Uint16Array(read(halves))));
for (const number of new Float32Array(read(beyond))) {
  try {
    page.toHalf(Float32Array.of(1, number));
    throw new Error(`${number} was taken`);
  } catch (error) {
    if (error.code !== "update.beyond-float16") throw error;
  }
}
"""


def test_float16(tmp_path: Path, seed: int) -> None:
    """The page rounds to float16 and back as numpy does."""
    draw = np.random.default_rng(seed)
    every = np.arange(2**16, dtype=np.uint16)
    finite = every[np.isfinite(every.view(np.float16))]
    numbers = finite.view(np.float16).astype(np.float64)
    # Halfway between each two neighbours, and the float32 numbers on both sides of it.
    sizes = numbers[: len(numbers) // 2]
    ties = np.float32((sizes[:-1] + sizes[1:]) / 2)
    around = [np.nextafter(ties, np.float32(side)) for side in (0, np.inf)]
    below = np.float32([65519, 65504, 0, -0.0, 1e-45, np.inf, -np.inf, np.nan])
    any_bits = draw.integers(2**32, size=100_000, dtype=np.uint32).view(np.float32)
    any_bits = any_bits[~(np.isfinite(any_bits) & (np.abs(any_bits) >= 65520))]
    given = np.concatenate([np.float32(numbers), ties, -ties, *around, below, any_bits])
    beyond = np.float32([65520, -65520, 1e5, 3.4e38])
    for name, array in (("given", given), ("halves", every), ("beyond", beyond)):
        array.tofile(tmp_path / name)
    paths = [str(tmp_path / name) for name in ("given", "halves", "beyond")]
    run_with("half_floats", HALVES, tmp_path, *paths)
    rounded = np.fromfile(tmp_path / "given.half", np.float16)
    expected = given.astype(np.float16)
    np.testing.assert_array_equal(rounded, expected)
    np.testing.assert_array_equal(np.signbit(rounded), np.signbit(expected))
    back = np.fromfile(tmp_path / "halves.float", np.float32)
    np.testing.assert_array_equal(back, every.view(np.float16).astype(np.float32))


STRUCTURES = """
const read = (path) => page.structureOf(page.readManifest(readFileSync(path, "utf8")));
console.log(JSON.stringify(await Promise.all(given.map(read))));
"""


def test_structures_of_bundles(tmp_path: Path) -> None:
    """Of plain and packed ports, and of samples in a range: a page's profiles are of its bundle."""
    towers = pack_inputs(two_towers(), user=("int64",), item=("int64",), numbers=(2,))
    ranged = set_input_range(nn.Linear(3, 2), -1e-7, 4.0)
    detection = TrainingConfig(4, loss="own_losses:detection")
    changed = TrainingConfig(4, augment=("flip",))
    manifests = []
    for model, shape, training in (
        (own_losses.Points(), (2, 5, 7), changed),
        (own_losses.Boxes(), (6,), detection),
        (towers, (4,), TrainingConfig(4)),
        (ranged, (3,), TrainingConfig(4)),
    ):
        submodel, out = split(model, "full", shape, training), tmp_path / str(len(manifests))
        export(submodel.program, submodel.cut(from_model(model)), out, base="0" * 64, check=False)
        manifests.append(str(out / "manifest.json"))
    expected = [structure(open_bundle(Path(path).parent).manifest) for path in manifests]
    assert json.loads(run_with("manifest", STRUCTURES, tmp_path, *manifests)) == expected


RANDOM = """
const drawn = JSON.parse(given[0]).map((entropy) => {
  const first = new page.NumpyRandom(entropy);
  const numbers = [...first.permutation(1000), first.integers(2 ** 31 - 1), first.integers(7)];
  const again = page.NumpyRandom.from(JSON.parse(JSON.stringify(first.save())));
  return [...numbers, again.integers(2 ** 31 - 1), ...again.permutation(5)];
});
console.log(JSON.stringify(drawn));
"""


def test_random_numbers(tmp_path: Path, seed: int) -> None:
    """The page draws the numbers that numpy draws: the same batches, the same seeds of masks."""
    draw = random.Random(seed)
    seeds = [[0, 1], [1, 0], [2**32, 3], [2**40 + 5, 2**31], [1, 2, 3, 4, 5, 6]]
    seeds += [[draw.randrange(2**53), draw.randrange(100)] for _ in range(50)]
    drawn = json.loads(run_with("numpy_random", RANDOM, tmp_path, json.dumps(seeds)))
    for entropy, numbers in zip(seeds, drawn, strict=True):
        numpys = np.random.default_rng(entropy)
        expected = [*numpys.permutation(1000), numpys.integers(2**31 - 1), numpys.integers(7)]
        expected += [numpys.integers(2**31 - 1), *numpys.permutation(5)]
        assert numbers == [int(number) for number in expected], entropy


ARCHIVES = """
const read = async (path) => {
  const file = new File([readFileSync(path)], "a.npz");
  const read = {};
  for (const [name, { dtype, shape, bytes }] of await page.readNpz(file)) {
    const pieces = [];
    for await (const piece of bytes()) pieces.push(piece);
    read[name] = [dtype, shape, Buffer.concat(pieces).toString("base64")];
  }
  return read;
};
const outcomes = [];
for (const path of given) {
  outcomes.push(await read(path).catch((error) => [error.code, error.fault?.values.file]));
}
console.log(JSON.stringify(outcomes));
"""


def archives(folder: Path, *contents: bytes) -> list:
    """What the page reads of each archive: its arrays, or the code of its refusal."""
    paths = [folder / f"{number}.npz" for number, _ in enumerate(contents)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return json.loads(run_with("npz", ARCHIVES, folder, *map(str, paths)))


def test_archives_of_numpy(tmp_path: Path, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(50, 3, 70)).astype(np.float32)
    y = np.arange(50)
    saved = []
    for save in (np.savez, np.savez_compressed):
        opened = io.BytesIO()
        save(opened, x=x, y=y, nothing=x[:0])
        saved.append(opened.getvalue())
    for arrays in archives(tmp_path, *saved):
        for name, array in {"x": x, "y": y, "nothing": x[:0]}.items():
            dtype, shape, content = arrays[name]
            assert (dtype, tuple(shape)) == (array.dtype.name, array.shape)
            assert base64.b64decode(content) == array.tobytes()


def test_damaged_archives(tmp_path: Path, seed: int) -> None:
    """Cut at any place, or with another byte in the numbers: the page refuses it by its name."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(50, 70)).astype(np.float32)
    damaged = [b"", b"no archive"]
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        opened, array = io.BytesIO(), io.BytesIO()
        np.save(array, x)
        with zipfile.ZipFile(opened, "w", method) as archive:
            archive.writestr("x.npy", array.getvalue())
        content = opened.getvalue()
        cuts = draw.integers(1, len(content), size=10)
        damaged += [content[:cut] for cut in (*cuts, len(content) - 1)]
        for index in draw.integers(400, len(content) // 2, size=10):
            damaged.append(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
        # A whole archive of an array that ends too early.
        with zipfile.ZipFile(opened := io.BytesIO(), "w", method) as archive:
            archive.writestr("x.npy", array.getvalue()[:-4])
        damaged.append(opened.getvalue())
    for number, outcome in enumerate(archives(tmp_path, *damaged)):
        assert outcome == ["data.unreadable", "a.npz"], number


TABLES = """
const series = JSON.parse(given[0]);
const outcomes = [];
for (const path of given.slice(1)) {
  try {
    const file = new File([readFileSync(path)], "a.csv");
    const { y, samples } = await page.windowsOf([file], series, 4, "int64", () => undefined);
    outcomes.push([[...y].map(Number), [...samples()].flatMap((piece) => [...piece])]);
  } catch (error) {
    const { line, text } = error.fault?.values ?? {};
    outcomes.push([error.code, line ?? null, text ?? null]);
  }
}
console.log(JSON.stringify(outcomes));
"""
SERIES = Series(
    columns=("a", "b"),
    label="what",
    classes=("sit", "go, fast"),
    step=1,
    mean=(0.5, -1),
    std=(2, 3),
)


def tables(folder: Path, *texts: str, series: Series = SERIES) -> tuple[list, list[Path]]:
    """What the page makes of each CSV text: labels and samples, or a code, a line and a cell."""
    paths = [folder / f"{number}.csv" for number, _ in enumerate(texts)]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode())
    given = [msgspec.json.encode(series).decode(), *map(str, paths)]
    return json.loads(run_with("windows", TABLES, folder, *given)), paths


@pytest.mark.parametrize("channels", ["first", "last"])
def test_tables_beside_the_agent(tmp_path: Path, seed: int, channels: str) -> None:
    """Quotation marks, empty lines, several delimiters, line ends and decimal signs."""
    draw = random.Random(seed)
    texts = []
    for delimiter, decimal, end in itertools.product(",;\t", ".,", ("\n", "\r\n", "\r")):
        if delimiter == decimal:
            continue
        rows = [["a", '"what"', '"b ""c"""', "b"]]
        for _ in range(40):
            first, second = (f"{draw.gauss(0, 9):.4g}".replace(".", decimal) for _ in range(2))
            label = draw.choice(["sit", '"sit"', '"go, fast"'])
            rows.append([first, label, f'"{delimiter}""{end}"', f" {second} "])
            if draw.random() < 0.2:
                rows.append([""])
        texts.append(end.join(delimiter.join(row) for row in rows) + end * draw.randrange(3))
    series = msgspec.structs.replace(SERIES, channels=channels)
    outcomes, paths = tables(tmp_path, *texts, series=series)
    for (y, x), path in zip(outcomes, paths, strict=True):
        labels, pieces = windows_of([path], series, (2, 2), "int64")
        assert y == labels.tolist()
        np.testing.assert_array_equal(np.float32(x), np.concatenate([*pieces]).ravel())


def test_mistakes_in_tables(tmp_path: Path) -> None:
    """The line is the last one of the row, as editors count."""
    head = "a,b,c,what\n"
    german = "a;b;what\n1,5;2;sit\n"
    mistakes = {
        f'{head}\n1,2,"\n",sit\n1,0x1,,sit\n': ["data.not-a-number", 5, "0x1"],
        f"{head}1,2,,sit\r\n1,2,,sits": ["data.unknown-class", 3, "sits"],
        f"{head}1,2,,sit\n1,,,sit\n": ["data.not-a-number", 3, ""],
        f"{german}\n1.5;2;sit\n": ["data.not-a-number", 4, "1.5"],
        f"{german}1,5;1,2,3;sit": ["data.not-a-number", 3, "1,2,3"],
        f'{head}1,2,"3,sit\n1,2,3,sit': ["data.unreadable-file", None, None],
        f'{head}1,2,"3"4,sit\n': ["data.unreadable-file", None, None],
        "a,what\n1,sit\n": ["data.missing-column", None, None],
        "": ["data.missing-column", None, None],
        f"{head}1,2,3,sit\n": ["data.too-few-samples", None, None],
    }
    outcomes, paths = tables(tmp_path, *mistakes)
    for expected, outcome, path in zip(mistakes.values(), outcomes, paths, strict=True):
        assert outcome == expected
        with refused(expected[0]):
            windows_of([path], SERIES, (2, 2), "int64")


GRAPHS = """
const outcomeOf = (path) => {
  try {
    page.checkGraph(new Uint8Array(readFileSync(path)), "train.onnx");
  } catch (error) {
    return [error.code, error.fault?.values.found];
  }
};
console.log(JSON.stringify(given.map((path) => outcomeOf(path) ?? null)));
"""
NAMES = {
    "a training of its own": "training",
    "functions": "functions",
    "values in another file": "outside",
    "operators of the domain 'com.evil'": "domain",
}


def test_graphs_that_no_export_makes(tmp_path: Path) -> None:
    negation = onnx.helper.make_node("Neg", ["x"], ["y"], domain="ai.onnx")
    plain = onnx.helper.make_model(onnx.helper.make_graph([negation], "g", [], []))
    whole = plain.SerializeToString()
    graphs = {"plain": (whole, None), "cut": (whole[:-1], "not-onnx"), "text": (b"no", "not-onnx")}
    for number, (change, reason) in enumerate(UNSAFE):
        changed = onnx.ModelProto.FromString(whole)
        change(changed)
        graphs[f"{number}"] = (changed.SerializeToString(), NAMES[reason])
    nested = b""
    for field in [7, *[1, 5, 6] * 100][::-1]:
        nested = bytes([field << 3 | 2]) + encoder._VarintBytes(len(nested)) + nested
    graphs["nested"] = (nested, "nested")
    for name, (content, _) in graphs.items():
        (tmp_path / name).write_bytes(content)
    outcomes = json.loads(
        run_with("graph_check", GRAPHS, tmp_path, *(str(tmp_path / name) for name in graphs))
    )
    expected = [name and ["bundle.unsafe-graph", name] for _, name in graphs.values()]
    assert outcomes == expected


NEW_KEYS = """
const [changes, starts, known] = given.map((text) => JSON.parse(text));
const taken = [];
for (const start of starts) {
  taken.push(await page.newKey(start, changes).catch((error) => error.code));
}
const client = { keyChanges: async () => changes };
const stored = {};
const put = async (more) => Object.assign(stored, more);
const values = { get: async (name) => stored[name] ?? null, put };
const trusted = new page.TrustedKey(client, { key: known.old, name: "phone" }, values);
const release = known.release;
await trusted.check((key) => page.checkRelease(release, key, 0));
console.log(JSON.stringify([taken, stored.device]));
"""


def test_the_page_follows_a_new_key_of_the_coordinator_as_the_agent_does(tmp_path: Path) -> None:
    """Changes that are signed, too late, forged, or not of this key; and what the page stores."""
    now, keys = int(time.time()), [CoordinatorKey() for _ in range(7)]
    times = [(0, 60), (0, 60), None, (-90, -30), None, (0, 60)]
    changes = [
        old.hands_over(new, now + span[0], now + span[1])
        for (old, new), span in zip(itertools.pairwise(keys), times, strict=True)
        if span is not None
    ]
    changes[-1] = replace(changes[-1], new=keys[0].public)
    starts = [key.fingerprint for key in keys]
    expected: list[str | None] = []
    for start in starts:
        try:
            expected.append(new_key(start, changes, "http://x"))
        except TrustError as error:
            expected.append(error.code)
    third = keys[2].public
    assert expected == [third, third, None, "trust.late-key", None, "trust.forged-key", None]
    release = msgspec.to_builtins(keys[2].releases(ReleaseOffer(number=2, issued=9)))
    known = {"old": keys[0].public, "release": release}
    given = (json.dumps(value) for value in (msgspec.to_builtins(changes), starts, known))
    taken, stored = json.loads(run_with("trust", NEW_KEYS, tmp_path, *given))
    assert taken == expected
    assert stored == {"key": third, "name": "phone"}


SIGNED = """
const [works, key, invitations, releases] = given.map((text) => JSON.parse(text));
const values = { get: async () => null, put: async () => undefined };
const taken = [];
for (const work of works) {
  taken.push(await page.checkWork(work, key, values).then(() => true, (error) => error.code));
}
for (const invitation of invitations) {
  const client = { invitation: async () => invitation };
  taken.push(await page.invited(client, null).then(() => true, (error) => error.code));
}
for (const release of releases) {
  taken.push(await page.checkRelease(release, key, 0).then(() => true, (error) => error.code));
}
console.log(JSON.stringify(taken));
"""


def test_signed_work_of_a_federation_that_its_devices_judge(tmp_path: Path) -> None:
    """The page checks the request for an evaluation, although it sends no counts."""
    key = CoordinatorKey()
    offer = FileOffer(name="manifest.json", size=3, sha256="a" * 64)
    asked = [None, EvaluationRequest(share=0.07), EvaluationRequest(share=0.1, by_class=True)]
    works, invitations = [], []
    for request in asked:
        work = Work(state="train", round=2, files=[offer], submodel="full", evaluation=request)
        works.append(msgspec.to_builtins(key.signed(work, time.time())))
        invitation = Invitation(title="Leaves", rounds=3, evaluation=request)
        invitations.append(msgspec.to_builtins(key.invites(invitation)))
    for signed in (works, invitations):
        signed.append({**signed[-1], "evaluation": {"share": 0.2, "by_class": True}})
    releases = [
        msgspec.to_builtins(key.releases(ReleaseOffer(number=2, files=[offer], issued=9, **more)))
        for more in ({}, {"fine_tune": 5, "training": [offer]})
    ]
    releases.append({**releases[-1], "fine_tune": 500})
    given = (json.dumps(value) for value in (works, key.public, invitations, releases))
    taken = json.loads(run_with("trust", SIGNED, tmp_path, *given))
    assert taken == [
        *(True, True, True, "trust.forged-work"),
        *(True, True, True, "trust.forged-invitation"),
        *(True, True, "trust.forged-release"),
    ]


COUNTS = """
const numbers = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const counts = JSON.parse(given[0], (_, value) => numbers[value] ?? value);
console.log(JSON.stringify(counts.map(page.finiteCounts)));
"""


def test_counts_of_a_model_that_has_diverged(tmp_path: Path) -> None:
    """The page sends what the agent sends."""
    sums: dict[str, Any] = {"loss_sum": 1.5, "absolute_sum": 1.0, "metrics": {"m": 2.0, "n": 0.5}}
    wrong = [{"loss_sum": "-inf"}, {"absolute_sum": "inf"}, {"metrics": {"m": 2.0, "n": "nan"}}]
    cases = [{"samples": 4, "counted": 3, **sums, **changes} for changes in ({}, *wrong)]
    sent = json.loads(run_with("evaluation_counts", COUNTS, tmp_path, json.dumps(cases)))
    counts = [msgspec.convert(case, EvaluationCounts, strict=False) for case in cases]
    assert sent == [msgspec.to_builtins(finite_counts(of_case)) for of_case in counts]


ANSWERS = """
const answers = JSON.parse(readFileSync(given[0])).map(([output, shape, logits]) => {
  const data = Float32Array.from(logits);
  return page.answerOf({ dtype: "float32", shape, data }, { output, signatures: {} });
});
const predict = { inputs: [], outputs: [{ shape: [null, 3, 1] }] };
const forms = JSON.parse(given[1]).map(([output, classes, inputs]) => {
  const signatures = { train: { inputs }, predict };
  return page.outputForm({ output: output ?? undefined, classes, signatures });
});
console.log(JSON.stringify([answers, forms]));
"""


def test_answers(tmp_path: Path, seed: int) -> None:
    """Probabilities of any logits beside PyTorch, for one class a sample and for many."""
    generator = torch.Generator().manual_seed(seed)

    def logits(*shape: int, scale: float = 5) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator)

    single = [logits(1, 10) for _ in range(50)] + [logits(1, 3, scale=1e4), logits(1, 1000)]
    binary = [logits(1, 1) for _ in range(50)] + [torch.tensor([[88.0]]), torch.tensor([[-1e9]])]
    steps, points = logits(1, 7, 4), logits(1, 4, 5, 6)
    spelled = logits(1, 60, 3)
    numbers, questions = logits(1, 2, 3), logits(1, 2, 3)
    outputs = [("softmax", x) for x in (*single, steps, points)]
    outputs += [("sigmoid", x) for x in binary] + [("ctc", spelled), ("numbers", numbers)]
    outputs += [("independent", questions)]
    (tmp_path / "outputs").write_text(
        json.dumps([(form, list(x.shape), x.flatten().tolist()) for form, x in outputs])
    )
    labels = {"kind": "labels", "dtype": "int64", "sequence": False, "shape": [None], "parts": []}
    bundles = [
        (None, 10, [labels]),
        (None, 1, [labels]),
        (None, 10, [{**labels, "sequence": True}]),
        (None, 1, [{**labels, "dtype": "float32"}]),
        (None, 1, [{**labels, "shape": [None, 3, 1]}]),
        (None, 1, [{**labels, "dtype": "float32", "parts": [{"name": "box", "shape": [4]}]}]),
        ("ctc", 10, []),
        ("numbers", 1, []),
    ]
    printed = run_with("answer", ANSWERS, tmp_path, str(tmp_path / "outputs"), json.dumps(bundles))
    answers, forms = json.loads(printed)
    own = ["softmax", "sigmoid", "ctc", "numbers", "independent", "outputs"]
    assert forms == [*own, "ctc", "numbers"]
    expected = [x.softmax(1)[0] for x in single]
    several = [steps.argmax(2).flatten().tolist(), points.argmax(1).flatten().tolist()]
    expected_binary = [torch.cat([1 - x.sigmoid(), x.sigmoid()]) for x in map(torch.ravel, binary)]
    named, answers = answers[: len(expected)], answers[len(expected) :]
    for x, answer in zip(expected, named, strict=True):
        assert answer["is"] == "classes"
        np.testing.assert_allclose(answer["probabilities"], x, rtol=0, atol=1e-6)
    assert [answer["classes"] for answer in answers[:2]] == several
    for x, answer in zip(expected_binary, answers[2:-3], strict=True):
        np.testing.assert_allclose(answer["probabilities"], x, rtol=0, atol=1e-6)
    runs = [index for index, _ in itertools.groupby(spelled.argmax(2).flatten().tolist())]
    assert answers[-3] == {"is": "sequence", "classes": [index for index in runs if index != 0]}
    np.testing.assert_array_equal(np.float32(answers[-2]["numbers"]), numbers.flatten())
    assert answers[-1]["is"] == "questions"
    expected_yes = questions.sigmoid().flatten()
    np.testing.assert_allclose(answers[-1]["probabilities"], expected_yes, rtol=0, atol=1e-6)


PRIVATE = """
const [manifest] = given;
try {
  page.readManifest(readFileSync(manifest, "utf-8"));
  console.log("read");
} catch (error) {
  console.log(error.fault.is);
}
"""


def test_bundles_with_private_samples_are_refused(tmp_path: Path) -> None:
    config = TrainingConfig(sample_clip=1.0, sample_noise=1.0)
    model = nn.Linear(4, 2)
    submodel = split(model, "full", (4,), config)
    bundle, values = tmp_path / "bundle", submodel.cut(from_model(model))
    export(submodel.program, values, bundle, base="", check=False)
    said = run_with("manifest", PRIVATE, tmp_path, str(bundle / "manifest.json"))
    assert said == "bundle.malformed/private\n"
