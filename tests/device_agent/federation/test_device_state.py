"""The device's state folder: which files are downloaded, kept and removed."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from device_agent.federation.default_state import default_state
from device_agent.federation.device_state import DeviceState
from device_agent.federation.identity.state_folder import Identity
from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import FORMAT_VERSION, MANIFEST, Manifest, TensorEntry, encode
from device_agent.formats.protocol.transfers import FileOffer
from device_agent.formats.update import UpdateRecord, write_update
from refusals import refused

Files = dict[str, bytes]


class Coordinator:
    """Offers `files`, and records which were fetched."""

    def __init__(self, files: Files) -> None:
        self.files, self.fetched = files, list[str]()

    def offers(self) -> list[FileOffer]:
        entries = {name: fingerprint(data) for name, data in self.files.items()}
        return [FileOffer(name=n, size=e.size, sha256=e.sha256) for n, e in entries.items()]

    def fetch(self, offer: FileOffer, to: Path) -> None:
        self.fetched.append(offer.name)
        to.parent.mkdir(exist_ok=True)
        to.write_bytes(self.files[offer.name])


def manifest(submodel: str = "cp:2.0", personal: int = 2) -> bytes:
    table = (TensorEntry(name="p", role="personal", dtype="float32", shape=(personal,)),)
    return encode(
        Manifest(
            version=FORMAT_VERSION,
            submodel=submodel,
            runtime="onnx",
            base="b",
            sample_shape=(1,),
            classes=2,
            signatures={},
            tensors=table,
            schedule=(),
            files={},
        )
    )


def test_unchanged_files_are_fetched_once_and_others_dropped(tmp_path: Path) -> None:
    state = DeviceState(tmp_path)
    server = Coordinator({MANIFEST: manifest(), "a.onnx": b"graph", "weights": b"one"})
    state.collect(server.offers(), server.fetch)
    server.files["weights"], server.fetched = b"two", []
    assert state.collect(server.offers(), server.fetch) == fingerprint(manifest()).sha256
    assert server.fetched == ["weights"]
    assert {p.name: p.read_bytes() for p in state.bundle.iterdir()} == server.files
    assert len(list((tmp_path / "files").iterdir())) == 3


def test_a_damaged_file_is_fetched_again(tmp_path: Path) -> None:
    state = DeviceState(tmp_path)
    server = Coordinator({MANIFEST: manifest(), "a.onnx": b"graph"})
    state.collect(server.offers(), server.fetch)
    (tmp_path / "files" / fingerprint(b"graph").sha256).write_bytes(b"grapf")
    server.fetched = []
    state.collect(server.offers(), server.fetch)
    assert server.fetched == ["a.onnx"]
    assert (state.bundle / "a.onnx").read_bytes() == b"graph"


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "", ".hidden", "a/b"])
def test_offers_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    server = Coordinator({MANIFEST: manifest(), name: b""})
    with refused("client.invalid-offer", file=name):
        DeviceState(tmp_path).collect(server.offers(), server.fetch)
    assert server.fetched == []


def test_offers_need_plain_hashes_and_a_manifest(tmp_path: Path) -> None:
    server = Coordinator({"a": b""})
    with refused("client.offer-without-manifest"):
        DeviceState(tmp_path).collect(server.offers(), server.fetch)
    offer = FileOffer(name="a", size=0, sha256="../../a")
    with refused("client.invalid-offer", file="a"):
        DeviceState(tmp_path).collect([offer], server.fetch)


def test_personal_tensors_stay_with_their_submodel(tmp_path: Path) -> None:
    state = DeviceState(tmp_path)
    mine = {"p": np.array([1, 2], np.float32)}

    def offered(data: bytes) -> dict[str, list[float]]:
        server = Coordinator({MANIFEST: data})
        state.collect(server.offers(), server.fetch)
        return {name: array.tolist() for name, array in state.personal().items()}

    assert offered(manifest()) == {}
    state.keep_personal(mine)
    assert offered(manifest()) == {"p": [1, 2]}
    assert offered(manifest("cp:4.0")) == {}
    assert offered(manifest(personal=3)) == {}
    (tmp_path / "personal.safetensors").write_bytes(b"damaged")
    assert offered(manifest()) == {}


def test_an_update_is_kept_until_its_bundle_changes(tmp_path: Path) -> None:
    state = DeviceState(tmp_path)
    record = UpdateRecord(
        bundle="this", base="b", submodel="full", samples=2, steps=1, loss_first=1.0,
        loss_last=1.0, tensors=(), file=fingerprint(b""),
    )  # fmt: skip
    assert state.trained("this") is None
    written = write_update(state.update, record, {})
    assert state.trained("this") == written
    assert state.trained("another") is None
    assert not state.update.exists()
    write_update(state.update, record, {})
    (state.update / "update.json").write_bytes(b"{")
    assert state.trained("this") is None


def test_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = DeviceState(tmp_path / "state")
    assert state.identity() is None
    known = Identity(url="http://h", device="d", secret="s", name="n", submodel="full")
    state.remember(known)
    assert state.identity() == known
    (tmp_path / "state" / "device.json").write_bytes(b"{}")
    with refused("state.damaged-identity", path=str(tmp_path / "state" / "device.json")):
        state.identity()
    shutil.rmtree(tmp_path / "state")
    (tmp_path / "state").write_bytes(b"a file")
    with refused("state.not-writable", path=str(tmp_path / "state")):
        state.check_writable()
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert default_state() == Path("/somewhere/edgetailor-agent")
