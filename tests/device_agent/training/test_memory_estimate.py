"""What signatures that are open together take, added up by hand."""

import msgspec
import pytest

from device_agent.formats.manifest import Manifest, Port, Signature, Step, TensorEntry, Train
from device_agent.training.memory_estimate import concurrent_peak_bytes, training_bytes
from profiles.cost_model.memory_rule import LITERT, ONNX

BATCH = 4
SESSION = ONNX.session_bytes
W, M, THETA = 4 * 100, 4 * 100, 4 * 30
"""Bytes of the tensors w and m (100 numbers each) and theta (30)."""
SIZES = {"w": 100, "m": 100, "theta": 30}


def state(name: str) -> Port:
    return Port(name=name, kind="state", dtype="float32", shape=(SIZES[name],), state=name)


X = Port(name="x", kind="samples", dtype="float32", shape=(None, 7))
Y = Port(name="y", kind="labels", dtype="int64", shape=(None,))
LOSS = Port(name="loss", kind="metric", dtype="float32", shape=())
PERSONAL_OWN, LOCAL_OWN, JUDGING_OWN = 5_000_000, 6_000_000, 50_000_000
"""Arena and nodes of each, bytes."""


def signature(inputs: tuple[Port, ...], outputs: tuple[Port, ...], peak: int | None) -> Signature:
    return Signature(graph="g.onnx", inputs=inputs, outputs=outputs, peak_bytes=peak)


def manifest(**peaks: int | None) -> Manifest:
    batch = 4 * BATCH * 7 + 8 * BATCH
    own = {
        "personal": SESSION + W + THETA + batch + (THETA + 4) + PERSONAL_OWN,
        "local": SESSION + W + M + THETA + (W + M) + LOCAL_OWN,
        "evaluate": SESSION + THETA + batch + 4 + JUDGING_OWN,
        **peaks,
    }
    steps = tuple(Step(signature=name, inputs={}) for name in ("personal", "local"))
    return Manifest(
        version=1,
        submodel="pfedme",
        runtime="onnx",
        base="",
        sample_shape=(7,),
        classes=2,
        signatures={
            "personal": signature((X, Y, state("w"), state("theta")), (LOSS, state("theta")),
                                  own["personal"]),
            "local": signature(tuple(map(state, SIZES)), (state("w"), state("m")), own["local"]),
            "evaluate": signature((X, Y, state("theta")), (LOSS,), own["evaluate"]),
        },
        tensors=tuple(
            TensorEntry(name=name, role="parameter", dtype="float32", shape=(size,))
            for name, size in SIZES.items()
        ),
        schedule=(Train(source="x", epochs=1, batch_size=BATCH, steps=steps),),
        files={},
    )  # fmt: skip


def test_what_is_shared_is_held_once() -> None:
    both = concurrent_peak_bytes(manifest(), ["personal", "local"])
    results = max(4 * BATCH * 7 + 8 * BATCH + THETA + 4, W + M)
    assert both == SESSION + W + M + THETA + results + PERSONAL_OWN + LOCAL_OWN


def test_alone_a_signature_takes_its_peak() -> None:
    about = manifest()
    for name, signature in about.signatures.items():
        assert concurrent_peak_bytes(about, [name]) == signature.peak_bytes


def test_a_personal_model_is_held_as_it_was_before_too() -> None:
    about = manifest()
    theirs = tuple(
        msgspec.structs.replace(e, role="personal") if e.name == "theta" else e
        for e in about.tensors
    )
    own = msgspec.structs.replace(about, tensors=theirs)
    for names in (["personal"], ["personal", "local"]):
        assert (
            concurrent_peak_bytes(own, names) == (concurrent_peak_bytes(about, names) or 0) + THETA
        )
    assert concurrent_peak_bytes(own, ["local"]) == concurrent_peak_bytes(
        about, ["local"]
    )  # which only reads it


def test_judging_takes_the_place_of_the_graphs_and_not_of_their_state() -> None:
    about = manifest()
    judging = about.signatures["evaluate"].peak_bytes
    assert judging is not None
    assert training_bytes(about, validating=True) == (judging + W + M, "evaluate")
    assert training_bytes(about) == (
        concurrent_peak_bytes(about, ["personal", "local"]),
        "local and personal",
    )


@pytest.mark.parametrize("name", ["personal", "evaluate"])
def test_without_a_prediction_nothing_is_known(name: str) -> None:
    about = manifest(**{name: None})
    assert training_bytes(about, validating=True) is None
    assert (training_bytes(about) is None) == (name == "personal")


def test_another_runtimes_session_is_that_runtimes() -> None:
    about = msgspec.structs.replace(manifest(), runtime="litert")
    names = ["personal", "local"]
    more = LITERT.session_bytes - SESSION
    # Of two peaks that hold a session each, one session is left.
    assert (
        concurrent_peak_bytes(about, names)
        == (concurrent_peak_bytes(manifest(), names) or 0) - more
    )
