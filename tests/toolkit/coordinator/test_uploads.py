"""Updates that the coordinator refuses."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from device_agent.client.replies import RefusedError
from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import encode
from device_agent.formats.update import RECORD, TENSORS, UpdateRecord
from made_profiles import sliced
from vector_fleet import SIZE, Fleet, configured, enrol, running, send, task, trained


def test_wrong_round(fleet: Fleet, tmp_path: Path) -> None:
    link = fleet[1]["desktop-1"]
    _, _, update = trained(link, tmp_path)
    with pytest.raises(RefusedError, match="Round 2 takes no updates now"):
        send(link, 2, update)


def test_wrong_bundle(fleet: Fleet, tmp_path: Path) -> None:
    _, _, update = trained(fleet[1]["board-1"], tmp_path)
    with pytest.raises(RefusedError, match="Round 1 offered desktop-1 the bundle"):
        send(fleet[1]["desktop-1"], 1, update)


def test_altered_bytes(fleet: Fleet, tmp_path: Path) -> None:
    link = fleet[1]["desktop-1"]
    _, _, update = trained(link, tmp_path)
    data = (update / TENSORS).read_bytes()
    (update / TENSORS).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(RefusedError, match="not those that were sent last"):
        send(link, 1, update)


def change(update: Path, record: UpdateRecord, data: bytes | None = None, **fields: object) -> None:
    """Rewrite an update by hand, as write_update would refuse to."""
    if data is not None:
        (update / TENSORS).write_bytes(data)
        fields["file"] = fingerprint(data)
    (update / RECORD).write_bytes(encode(msgspec.structs.replace(record, **fields)))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": np.full(SIZE, np.nan, np.float32)}, "not finite; training diverged"),
        ({"w": np.zeros(SIZE - 1, np.float32)}, "its bundle says float32"),
        ({"w": np.zeros(SIZE, np.float64)}, "its bundle says float32"),
        ({"v": np.zeros(SIZE, np.float32)}, "is not from this bundle"),
        ({}, "the tensor 'w' is missing"),
    ],
)
def test_unusable_tensors(
    fleet: Fleet, tmp_path: Path, tensors: dict[str, np.ndarray], message: str
) -> None:
    link = fleet[1]["desktop-1"]
    _, record, update = trained(link, tmp_path)
    change(update, record, save(tensors))
    with pytest.raises(RefusedError, match=message) as refused:
        send(link, 1, update)
    assert refused.value.code == "unusable-update"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"samples": 0}, "must be trained on 1 to 1,000,000,000,000 samples, not on 0"),
        ({"samples": 10**400}, "not on more than 1,000,000,000,000"),
        ({"version": 9}, "version 9; this program reads 1"),
        ({"tensors": ()}, "lists other tensors than its bundle"),
        ({"base": "f" * 64}, "Train the bundle again"),
        ({"profile": sliced()}, "the profile is of 'slice:blocks.3', the update of 'full'"),
    ],
)
def test_unusable_records(
    fleet: Fleet, tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    link = fleet[1]["desktop-1"]
    _, record, update = trained(link, tmp_path)
    change(update, record, None, **fields)
    with pytest.raises(RefusedError, match=message):
        send(link, 1, update)


def test_no_record_and_no_tensor_file(fleet: Fleet, tmp_path: Path) -> None:
    link = fleet[1]["desktop-2"]
    with pytest.raises(RefusedError, match=r"update\.json of this request is not an update record"):
        link.send_update(1, b"{")
    _, record, update = trained(link, tmp_path)
    with pytest.raises(RefusedError, match=r"PUT update\.safetensors first"):
        link.send_update(1, (update / RECORD).read_bytes())
    change(update, record, b"these are no tensors")
    with pytest.raises(RefusedError, match="is not a safetensors file"):
        send(link, 1, update)
    data = save({"w": np.zeros(SIZE, np.float32)})
    change(update, record, data)
    described = msgspec.json.decode((update / RECORD).read_bytes(), type=UpdateRecord)
    size = msgspec.structs.replace(described.file, size=1)
    change(update, described, file=size)
    with pytest.raises(RefusedError, match=f"announced 1 bytes and sent {len(data)}"):
        send(link, 1, update)


def test_uploads_are_cut_off_over_the_limit(fleet: Fleet, tmp_path: Path) -> None:
    server, links = fleet
    task(links["desktop-1"])
    (tmp_path / "big").write_bytes(bytes(4 * SIZE + (64 << 10) + 1))
    with pytest.raises(RefusedError, match=f"at most {4 * SIZE + (64 << 10)} bytes"):
        links["desktop-1"].send_tensors(1, tmp_path / "big")
    assert not list((server.config.state / "files").glob(".*"))


def test_the_same_update_again_is_fine_and_another_is_not(tmp_path: Path) -> None:
    with running(configured(tmp_path)) as server:
        link = enrol(server, tmp_path)["desktop-1"]
        _, record, update = trained(link, tmp_path / "a")
        send(link, 1, update)
        send(link, 1, update)
        change(update, record, samples=11)
        with pytest.raises(RefusedError, match="another update for round 1 already"):
            send(link, 1, update)
