"""Devices that get the strongest submodel that fits them, planned when they enrol."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest
import urllib3

from bundles import SAMPLE_SHAPE, TRAINING, tiny_model
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.replies import RefusedError
from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.federation.membership import join, leave
from device_agent.formats.bundle import open_bundle
from device_agent.formats.protocol.joining import JoinRequest
from device_agent.formats.protocol.rounds import SubmodelFailure
from device_agent.training.memory_refusal import needed_bytes
from edgetailor import split
from exporters.export import export
from log_messages import logged
from made_calibration import DEVICE
from parameters import some_long
from profiles.cost_model.memory_rule import TRAINING_RESERVE_BYTES, UNCALIBRATED
from profiles.cost_model.prediction import predict_memory
from profiles.documents.device_profile import DeviceProfile
from profiles.errors import InputError
from toolkit.coordinator.devices.submodel_assignment import Planner
from toolkit.coordinator.server import Server
from toolkit.planning.candidate_lookup import candidate
from toolkit.planning.plan import find_workloads
from toolkit.planning.submodel_workloads import Known, Workloads
from vector_fleet import (
    CONFIG,
    MACHINE,
    assert_soon,
    configured,
    documented,
    running,
    send,
    send_trained,
    token,
    trained,
)

HEAD = CONFIG[: CONFIG.index("[[devices]]")]
PHONE = '[[devices]]\nname = "phone"\nsubmodel = "auto"\n'
PROFILE = msgspec.to_builtins(DEVICE)


def changed(**figures: object) -> dict[str, object]:
    """The profile with other figures in its calibration."""
    return PROFILE | {"calibration": PROFILE["calibration"] | figures}


def measured(name: str, folder: Path) -> DeviceProfile:
    return DEVICE


def unasked(name: str, folder: Path) -> DeviceProfile:
    raise AssertionError("nothing is to be measured")


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    model, _ = tiny_model()
    cache = tmp_path_factory.mktemp("cache")
    workloads = Workloads(model, SAMPLE_SHAPE, TRAINING, cache=cache)
    known, impossible = find_workloads(workloads, ["full", "width:0.5", "slice:no-such-layer"])
    assert [one.submodel for one in impossible] == ["slice:no-such-layer"]
    return Planner(tuple(known), impossible)


def between(planner: Planner) -> int:
    """A budget of memory that is enough for the narrow model and not for the whole one."""
    upper = {one.submodel: candidate(one, DEVICE).memory.upper for one in planner.known}
    assert upper["width:0.5"] < upper["full"]
    return int((upper["width:0.5"] + upper["full"]) / 2)


def ask(server: Server, request: JoinRequest) -> tuple[int, dict[str, str]]:
    headers = {"Authorization": f"Bearer {token(server.config, 'phone')}"}
    url = f"{server.url}/v1/devices"
    answer = urllib3.request("POST", url, json=asdict(request), headers=headers)
    return answer.status, answer.json()


def test_a_device_gets_what_fits_it(planner: Planner, tmp_path: Path) -> None:
    config = configured(tmp_path / "c", f'{HEAD}{PHONE}memory = "{between(planner)}B"\n')
    with running(config, planner=planner) as server, logged() as said:
        bearer, state = token(config, "phone"), tmp_path / "a"
        joined = join(server.url, bearer, "mine", state, measure=measured)
        assert [said[0], said[3]] == [  # between them a warning of the bare token, and DATA
            "The coordinator needs a profile of this device: measuring, about a minute.",
            f"Joined {server.url} as phone-1 (mine); it trains width:0.5.",
        ]
        (state / "device.json").unlink()
        again = join(server.url, bearer, "mine", state, measure=unasked)
        assert (again.device, again.submodel) == (joined.device, "width:0.5")
    with running(config, planner=planner) as server:
        link = CoordinatorClient(server.url, again.secret)
        work, record, update = trained(link, tmp_path / "one")
        assert (work.round, record.submodel) == (1, "width:0.5")
        send(link, 1, update)
        assert [d.submodel for d in link.status().devices] == ["width:0.5"]


def test_without_a_budget_the_memory_that_was_available_is_one(
    planner: Planner, tmp_path: Path
) -> None:
    config = configured(tmp_path / "c", f"{HEAD}{PHONE}")
    with running(config, planner=planner) as server:
        bearer = token(config, "phone")
        joined = join(server.url, bearer, "mine", tmp_path / "a", measure=measured)
    assert joined.submodel == "full"  # half of 512 MB is plenty


def test_a_device_that_nothing_fits_takes_no_place(planner: Planner, tmp_path: Path) -> None:
    config = configured(tmp_path / "c", f'{HEAD}{PHONE}memory = "2MB"\n')
    with running(config, planner=planner) as server:
        bearer = token(config, "phone")
        with pytest.raises(
            RefusedError, match=r"^No submodel fits made-up\. width:0\.5 comes nearest"
        ) as refused:
            join(server.url, bearer, "mine", tmp_path / "a", measure=measured)
        assert refused.value.exit_code == 5
        said = str(refused.value)
        assert documented("plan.nothing-fits").match(said)
        needed = re.search(r'would fit with (memory = "[0-9.]+MB")\)\. ', said)
        assert needed, said
        assert said.endswith(
            "The budgets of kind 'phone' are in the federation's file: ask the operator of the "
            "coordinator."
        )
        assert not (tmp_path / "a").exists()
        assert server.coordinator.status().devices == []
        unknown = msgspec.structs.replace(DEVICE, memory_bytes=None)
    enough = configured(tmp_path / "b", f"{HEAD}{PHONE}{needed[1]}\n")
    with running(enough, planner=planner) as server:
        bearer = token(enough, "phone")
        join(server.url, bearer, "mine", tmp_path / "a", measure=measured)  # now it fits
    config = configured(tmp_path / "d", f"{HEAD}{PHONE}")
    with running(config, planner=planner) as server:
        request = DeviceKey.new().join_request(
            token(config, "phone"), "mine", MACHINE, msgspec.to_builtins(unknown)
        )
        status, problem = ask(server, request)
        assert (status, problem["code"]) == (409, "join.unknown-memory")
        assert "set `memory` of the kind 'phone'" in problem["message"]
        assert documented("join.unknown-memory").match(problem["message"])


@pytest.mark.parametrize(
    ("profile", "status", "code"),
    [
        (None, 409, "join.needs-profile"),
        ({}, 422, "join.bad-profile"),
        (PROFILE | {"memory_bytes": "much"}, 422, "join.bad-profile"),
        (PROFILE | {"version": 99}, 422, "join.bad-profile"),
        (PROFILE | {"memory_available_bytes": 0}, 422, "join.bad-profile"),
        (changed(node_s=1e308), 422, "join.bad-profile"),
        (changed(timings=[["product", [], 1.0]]), 422, "join.bad-profile"),
        (changed(timings=[["product", [1, 2, 3, 2**64], 1.0]]), 422, "join.bad-profile"),
        (changed(timings=[]), 409, "join.unusable-profile"),
        (PROFILE | {"title": "x" * 2_000_000}, 422, "join.bad-profile"),
        (PROFILE | {"title": "x" * 140_000}, 422, "join.bad-profile"),
    ],
    ids=[
        "none",
        "empty",
        "words",
        "newer",
        "no memory",
        "slow",
        "flat",
        "vast",
        "untimed",
        "long",
        "slow to plan by",
    ],
)
def test_profiles_that_are_none(
    planner: Planner, tmp_path: Path, profile: dict[str, object], status: int, code: str
) -> None:
    config = configured(tmp_path / "c", f"{HEAD}{PHONE}")
    with running(config, planner=planner) as server:
        request = DeviceKey.new().join_request(token(config, "phone"), "mine", MACHINE)
        answer = ask(server, replace(request, profile=profile))
        assert (answer[0], answer[1]["code"]) == (status, code)
        assert server.coordinator.status().devices == []


def test_a_planned_device_that_cannot_gets_the_fallback(planner: Planner, tmp_path: Path) -> None:
    config = configured(tmp_path / "c", f'{HEAD}{PHONE}fallback = "slice:0.2"\n')
    with running(config, planner=planner) as server:
        bearer = token(config, "phone")
        joined = join(server.url, bearer, "mine", tmp_path / "a", measure=measured)
        link = CoordinatorClient(server.url, joined.secret)
        assert trained(link, tmp_path / "one")[1].submodel == "full"
        failure = SubmodelFailure(submodel="full", failures=3, reason="out of memory")
        assert link.report(failure).submodel == "slice:0.2"


def test_nothing_is_measured_for_a_federation_that_is_over(
    planner: Planner, tmp_path: Path
) -> None:
    config = configured(tmp_path / "c", f"{HEAD}{PHONE}".replace("rounds = 3", "rounds = 1"))
    with running(config, planner=planner) as server:
        bearer = token(config, "phone")
        last = join(server.url, bearer, "mine", tmp_path / "a", measure=measured)
        link = CoordinatorClient(server.url, last.secret)
        send_trained(link, 1, tmp_path / "one")
        assert_soon(lambda: link.work().state == "finished")
        (tmp_path / "a" / "device.json").unlink()  # who was in it may still come back
        join(server.url, bearer, "mine", tmp_path / "a", measure=unasked)
        with pytest.raises(RefusedError, match=r"^This federation is over"):  # and full
            join(server.url, bearer, "other", tmp_path / "b", measure=unasked)
        leave(tmp_path / "a")
        with pytest.raises(RefusedError) as refused:
            join(server.url, bearer, "other", tmp_path / "b", measure=unasked)
    assert str(refused.value) == (
        "This federation is over: all of its rounds (1) are done, so there is nothing left to "
        "train."
    )
    assert documented("federation.finished").match(str(refused.value))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            '[[devices]]\nname = "a"\nsubmodel = "full"\nbandwidth = "1GB"\n',
            r'need a planned submodel; set submodel = "auto"',
        ),
        (f'{PHONE}memory = "120"\n', r"`devices\[0\]\.memory` .*Invalid size '120': write"),
        (f"{PHONE}memory = 120\n", r"`devices\[0\]\.memory` is 120: Invalid size '120': write"),
        (
            f"{PHONE}memory = 1.5\n",
            r"`devices\[0\]\.memory` is 1\.5: Invalid size '1\.5': write",
        ),
        (f"{PHONE}memory = true\n", r"`devices\[0\]\.memory` is true"),
        (f"{PHONE}bandwidth = 9\n", r"`devices\[0\]\.bandwidth` is 9: Invalid size '9': write"),
        (f"{PHONE}step_time = 0\n", r"`devices\[0\]\.step_time` is 0"),
        (
            f"{PHONE}step_tme = 1\n",
            r"unknown key `devices\[0\]\.step_tme`: did you mean 'step_time'\? .*memory, step_time",
        ),
    ],
)
def test_what_a_configuration_cannot_mean(tmp_path: Path, kind: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        configured(tmp_path, HEAD + kind)


@pytest.mark.parametrize(
    "spec", some_long(["full", "cp:2", "slice:classifier"], "cp:2", "slice:classifier")
)
def test_a_workload_does_not_depend_on_rates_and_epochs(spec: str, tmp_path: Path) -> None:
    """So that the cache may give what was read off the graphs of another rate."""
    model, _ = tiny_model()
    others = (
        replace(TRAINING, learning_rate=1.0),
        replace(TRAINING, learning_rate=0.0, round_decay=0.5, epochs=7),
        replace(TRAINING, epochs=1, steps=7, milestones=(2,)),
    )
    all_of_them = [
        Workloads(model, SAMPLE_SHAPE, training, cache=tmp_path / str(number))
        for number, training in enumerate((TRAINING, *others))
    ]
    first, *rest = [workloads.of(spec) for workloads in all_of_them]
    assert isinstance(first, Known)
    assert rest == [first] * 3
    assert len({workloads.key for workloads in all_of_them}) == 1


CHANGES: list[dict[str, object]] = [
    *({"momentum": 0.0}, {"optimizer": "adam"}, {"proximal": 0.1}, {"masked": True}),
    *({"weight_decay": 0.1}, {"batch_size": 8}),
]


@pytest.mark.parametrize("change", some_long(CHANGES, *CHANGES[1:-1]), ids=str)
def test_a_workload_depends_on_what_a_step_does(change: dict[str, object], tmp_path: Path) -> None:
    model, _ = tiny_model()
    changed = replace(TRAINING, **change)  # type: ignore[arg-type]
    one, other = (Workloads(model, SAMPLE_SHAPE, t, cache=tmp_path) for t in (TRAINING, changed))
    assert one.key != other.key
    first, second = one.of("full"), other.of("full")
    assert isinstance(first, Known)
    assert isinstance(second, Known)
    assert first.work != second.work


@pytest.mark.parametrize("spec", some_long(["full", "pfedme"], "pfedme"))
def test_what_trains_all_has_strength_one(spec: str, tmp_path: Path) -> None:
    """The model counts the batches of its norms, which no device sends."""
    model, numbers = tiny_model()
    assert any(not tensor.is_floating_point() for tensor in numbers.tensors.values())
    known = Workloads(model, SAMPLE_SHAPE, TRAINING, cache=tmp_path).of(spec)
    assert isinstance(known, Known)
    assert known.strength == 1


@pytest.mark.parametrize(
    "spec",
    some_long(
        ["full", "width:0.5", "slice:classifier", "cp:2", "pfedme"], "width:0.5", "cp:2", "pfedme"
    ),
)
def test_the_agent_does_not_refuse_what_a_plan_admits(spec: str, tmp_path: Path) -> None:
    """In its own reckoning it holds the connection, 6 MB, before it adds what training takes."""
    model, numbers = tiny_model()
    known = Workloads(model, SAMPLE_SHAPE, TRAINING, cache=tmp_path / "cache").of(spec)
    assert isinstance(known, Known)
    submodel = split(model, spec, SAMPLE_SHAPE, TRAINING)
    out = tmp_path / "bundle"
    export(submodel.program, submodel.cut(numbers), out, base="", check=False)
    manifest = open_bundle(out).manifest
    found = needed_bytes(manifest, validating=False)
    assert found is not None
    admitted = candidate(known, DEVICE).memory.upper - UNCALIBRATED.idle_bytes
    assert admitted >= found[0] + 6e6
    # One goes by the manifest, the other by the graphs, without their few constants.
    growth = predict_memory(known.work, UNCALIBRATED).value - UNCALIBRATED.idle_bytes
    assert 0 <= found[0] - TRAINING_RESERVE_BYTES - growth < 10_000
