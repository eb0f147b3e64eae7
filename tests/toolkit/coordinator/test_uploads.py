"""Updates that the coordinator refuses."""

import sqlite3
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.evaluation_counts import Evaluation
from device_agent.formats.manifest import encode
from device_agent.formats.update import RECORD, TENSORS, UpdateRecord
from made_profiles import sliced
from refusals import refused
from vector_fleet import SIZE, Fleet, configured, enrol, running, send, task, trained


def test_wrong_round(fleet: Fleet, tmp_path: Path) -> None:
    link = fleet[1]["desktop-1"]
    _, _, update = trained(link, tmp_path)
    with refused("round.closed", "Round 2 "):
        send(link, 2, update)


def test_wrong_bundle(fleet: Fleet, tmp_path: Path) -> None:
    _, _, update = trained(fleet[1]["board-1"], tmp_path)
    with refused("round.other-bundle", "Round 1 offered desktop-1 "):
        send(fleet[1]["desktop-1"], 1, update)


def test_altered_bytes(fleet: Fleet, tmp_path: Path) -> None:
    link = fleet[1]["desktop-1"]
    _, _, update = trained(link, tmp_path)
    data = (update / TENSORS).read_bytes()
    (update / TENSORS).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with refused("round.tensors-not-sent"):
        send(link, 1, update)


EVALUATED = partial(Evaluation, samples=4, loss=1.0, correct=2, counted=4)


def change(update: Path, record: UpdateRecord, data: bytes | None = None, **fields: object) -> None:
    """Rewrite an update by hand, as write_update would refuse to."""
    if data is not None:
        (update / TENSORS).write_bytes(data)
        fields["file"] = fingerprint(data)
    (update / RECORD).write_bytes(encode(msgspec.structs.replace(record, **fields)))


@pytest.mark.parametrize(
    ("tensors", "code", "words"),
    [
        ({"w": np.full(SIZE, np.nan, np.float32)}, "update.not-finite", "'w'"),
        ({"w": np.zeros(SIZE - 1, np.float32)}, "update.wrong-shape", "its bundle says float32"),
        ({"w": np.zeros(SIZE, np.float64)}, "update.wrong-shape", "its bundle says float32"),
        ({"v": np.zeros(SIZE, np.float32)}, "update.missing-tensor", "'w'"),
        (
            {name: np.zeros(SIZE, np.float32) for name in "vw"},
            "update.unexpected-tensor",
            "'v'",
        ),
        ({}, "update.missing-tensor", "'w'"),
    ],
)
def test_unusable_tensors(
    fleet: Fleet, tmp_path: Path, tensors: dict[str, np.ndarray], code: str, words: str
) -> None:
    link = fleet[1]["desktop-1"]
    _, record, update = trained(link, tmp_path)
    change(update, record, save(tensors))
    with refused(code, words):
        send(link, 1, update)


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"samples": 0}, "update.unusable-samples", "not on 0"),
        ({"steps": -5}, "update.malformed-record", "$.steps"),
        ({"steps": 2**53}, "update.malformed-record", "$.steps"),
        ({"validation": (EVALUATED(samples=-1),)}, "update.malformed-record", "samples"),
        ({"validation": (EVALUATED(correct=-1),)}, "update.malformed-record", "correct"),
        ({"validation": (EVALUATED(correct=5),)}, "update.unusable-validation", "claims 5"),
        ({"validation": (EVALUATED(),) * 9999}, "update.too-long-record", "262,144 bytes"),
        ({"samples": 10**400}, "update.unusable-samples", "not on more than 1,000,000,000,000"),
        ({"version": 9}, "update.wrong-version", "version 9; this program reads 1"),
        ({"tensors": ()}, "update.other-tensors", "desktop-1"),
        ({"base": "f" * 64}, "update.other-bundle", "from the model ffffffffffff"),
        ({"submodel": "cp:2.0"}, "update.other-bundle", "'cp:2.0'"),
        (
            {"profile": sliced()},
            "update.other-profile",
            "for 'slice:blocks.3', but the update is for 'full'",
        ),
    ],
)
def test_unusable_records(
    fleet: Fleet, tmp_path: Path, fields: dict[str, object], code: str, words: str
) -> None:
    link = fleet[1]["desktop-1"]
    _, record, update = trained(link, tmp_path)
    change(update, record, None, **fields)
    with refused(code, words):
        send(link, 1, update)


def test_a_record_with_a_key_twice_and_what_is_kept_of_one(tmp_path: Path) -> None:
    """What was checked is what is stored and counted, and nothing else that came with it."""
    with running(configured(tmp_path)) as server:
        links = enrol(server, tmp_path)
        work, record, update = trained(links["desktop-1"], tmp_path / "u")
        body = (update / RECORD).read_bytes()
        links["desktop-1"].send_tensors(work.round, update / TENSORS)
        twice = body.replace(b'"steps": 1', b'"steps": 7, "steps": 1')
        with refused("update.malformed-record", "'steps' twice"):
            links["desktop-1"].send_update(work.round, twice)
        for spaces in (b"", b" " * 10_000):  # the same record, so the same update
            links["desktop-1"].send_update(work.round, body.replace(b"\n", b"\n" + spaces))
        [(_, _, kept)] = server._store.updates(work.round)
        assert kept == encode(msgspec.structs.replace(record, file=record.file))
        connection = sqlite3.connect(server.config.state / "state.sqlite3")
        row = connection.execute("SELECT samples, steps, loss_first, loss_last FROM updates")
        assert row.fetchall() == [(record.samples, 1, 2.0, 1.0)]
        connection.close()


def test_no_record_and_no_tensor_file(fleet: Fleet, tmp_path: Path) -> None:
    link = fleet[1]["desktop-2"]
    with refused("update.malformed-record"):
        link.send_update(1, b"{")
    _, record, update = trained(link, tmp_path)
    with refused("round.tensors-not-sent", "PUT update.safetensors first"):
        link.send_update(1, (update / RECORD).read_bytes())
    change(update, record, b"these are no tensors")
    with refused("update.unreadable-tensors"):
        send(link, 1, update)
    data = save({"w": np.zeros(SIZE, np.float32)})
    change(update, record, data)
    described = msgspec.json.decode((update / RECORD).read_bytes(), type=UpdateRecord)
    size = msgspec.structs.replace(described.file, size=1)
    change(update, described, file=size)
    with refused("update.wrong-size") as caught:
        send(link, 1, update)
    assert f"announced 1 bytes and sent {len(data)}" in str(caught.value)


def test_uploads_are_cut_off_over_the_limit(fleet: Fleet, tmp_path: Path) -> None:
    server, links = fleet
    task(links["desktop-1"])
    (tmp_path / "big").write_bytes(bytes(4 * SIZE + (64 << 10) + 1))
    with refused("update.too-large", f"at most {4 * SIZE + (64 << 10)} bytes"):
        links["desktop-1"].send_tensors(1, tmp_path / "big")
    assert not list((server.config.state / "incoming").iterdir())


def test_the_same_update_again_is_fine_and_another_is_not(tmp_path: Path) -> None:
    with running(configured(tmp_path)) as server:
        link = enrol(server, tmp_path)["desktop-1"]
        _, record, update = trained(link, tmp_path / "a")
        send(link, 1, update)
        send(link, 1, update)
        change(update, record, samples=11)
        with refused("round.already-sent") as caught:
            send(link, 1, update)
        assert "desktop-1 " in str(caught.value)
        assert "round 1" in str(caught.value)
