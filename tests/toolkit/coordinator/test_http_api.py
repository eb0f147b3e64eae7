"""Who the coordinator lets in, and what its routes answer and say of themselves."""

import json
import stat
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import urllib3

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation import membership, round_loop
from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.federation.run_options import RunOptions
from device_agent.formats.protocol.joining import JoinRequest
from log_messages import logged
from profiles.errors import InputError
from refusals import refused
from vector_fleet import MACHINE, Fleet, token


def test_tokens_and_secrets(fleet: Fleet, tmp_path: Path) -> None:
    server, _ = fleet
    with refused("join.unknown-token"):
        membership.join(server.url, "guess", "x", tmp_path / "a")
    with refused("join.used-up-token", "1 device of kind 'board'"):
        membership.join(server.url, token(server.config, "board"), "x", tmp_path / "b")
    for call in ("work", "status"):
        with refused("client.not-authorised"):
            getattr(CoordinatorClient(server.url, "guess"), call)()
    answer = urllib3.request("GET", f"{server.url}/v1/work")
    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert answer.json()["code"] == "client.not-authorised"
    for file in ("operator.token", "tokens/board.token"):
        assert stat.S_IMODE((server.config.state / file).stat().st_mode) == 0o600


def test_joining_again(fleet: Fleet, tmp_path: Path) -> None:
    server, _ = fleet
    state = server.config.state.parent / "0"
    same = token(server.config, "desktop")
    with logged() as said:
        assert membership.join(server.url + "/", same, "x", state).device == "desktop-1"
    assert said == [f"machine 0 has joined {server.url} already, as desktop-1."]
    with pytest.raises(InputError) as error:
        membership.join(server.url, token(server.config, "board"), "x", state)
    assert str(error.value) == (
        f"{state} belongs to desktop-1, which joined {server.url} with another token. For a second "
        "device on this machine, give another folder with --state. To give up the membership as "
        "desktop-1 and join with this token, use --replace."
    )
    assert stat.S_IMODE((state / "device.json").stat().st_mode) == 0o600
    with refused("state.other-coordinator", url=server.url):
        membership.join("http://elsewhere:1", "t", "x", state)
    with refused("state.not-joined", path=str(tmp_path)):
        round_loop.run(RunOptions(data="data.npz", state=tmp_path))


def test_other_requests_get_a_problem_too(fleet: Fleet) -> None:
    server, links = fleet
    secret = token(server.config, "board")
    headers = {"Authorization": f"Bearer {secret}"}
    answer = urllib3.request("GET", f"{server.url}/nothing")
    assert (answer.status, answer.json()["code"]) == (404, "client.no-such-route")
    answer = urllib3.request("POST", f"{server.url}/v1/devices", json={}, headers=headers)
    assert answer.json() == {
        "code": "client.bad-request",
        "message": "The body of the request cannot be used: Object missing required field `name`.",
    }
    request = asdict(replace(DeviceKey.new().join_request(secret, "x", MACHINE), name="\n"))
    answer = urllib3.request("POST", f"{server.url}/v1/devices", json=request, headers=headers)
    assert answer.json()["code"] == "join.bad-name"
    with refused("round.no-such-file"):
        links["board-1"]._ask("GET", f"/files/{'0' * 64}", JoinRequest)


def test_the_api_describes_itself(fleet: Fleet) -> None:
    document = urllib3.request("GET", f"{fleet[0].url}/openapi.json").json()
    routes = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert routes == {
        ("get", "/v1/invitation"),
        ("post", "/v1/devices"),
        ("get", "/v1/key-changes"),
        ("get", "/v1/work"),
        ("get", "/v1/files/{sha256}"),
        ("post", "/v1/progress"),
        ("post", "/v1/problems"),
        ("post", "/v1/stopped"),
        ("post", "/v1/secret"),
        ("post", "/v1/leave"),
        ("get", "/v1/rounds/{round}/tensors/{sha256}"),
        ("put", "/v1/rounds/{round}/tensors/{sha256}"),
        ("post", "/v1/rounds/{round}/update"),
        ("post", "/v1/releases/{number}"),
        ("post", "/v1/rounds/{round}/evaluation"),
        ("get", "/v1/rounds/{round}/sum"),
        ("post", "/v1/rounds/{round}/sum/keys"),
        ("post", "/v1/rounds/{round}/sum/shares"),
        ("post", "/v1/rounds/{round}/sum/input"),
        ("post", "/v1/rounds/{round}/sum/confirmation"),
        ("post", "/v1/rounds/{round}/sum/unmasking"),
        ("get", "/v1/status"),
        ("get", "/v1/operator/devices"),
        ("get", "/v1/operator/devices/{device}"),
        ("post", "/v1/operator/devices/{device}/secret"),
        ("post", "/v1/operator/devices/{device}/{action}"),
        ("post", "/v1/operator/rounds/{round}/close"),
        ("post", "/v1/operator/rounds/{round}/deadline"),
        ("post", "/v1/operator/rounds/{round}/abort"),
        ("post", "/v1/operator/rounds/{round}/updates/{device}/drop"),
        ("post", "/v1/operator/rounds/pause"),
        ("post", "/v1/operator/rounds/resume"),
        ("post", "/v1/operator/model"),
        ("get", "/v1/operator/settings"),
        ("post", "/v1/operator/settings"),
        ("get", "/v1/operator/key"),
        ("post", "/v1/operator/key"),
        ("get", "/v1/operator/join-tokens"),
        ("post", "/v1/operator/join-tokens"),
        ("post", "/v1/operator/join-tokens/{number}/revoke"),
        ("get", "/v1/operator/operators"),
        ("post", "/v1/operator/operators"),
        ("post", "/v1/operator/operators/{name}/revoke"),
        ("get", "/v1/operator/audit"),
        ("get", "/healthz"),
        ("get", "/readyz"),
        ("get", "/metrics"),
    }
    for methods in document["paths"].values():
        for route in methods.values():
            assert route["summary"]
            assert route["description"]
            open_to_all = route["summary"] in ("Is it alive?", "Can devices join and train?")
            assert route.get("security") == (None if open_to_all else [{"HTTPBearer": []}])
    schemas = document["components"]["schemas"]
    references = {part.split('"')[0] for part in json.dumps(document).split("/schemas/")[1:]}
    assert references <= schemas.keys()
    assert {"UpdateRecord", "TensorEntry", "Profile", "Work"} <= schemas.keys()
    for message, number in (("JoinRequest", "timestamp"), ("SubmodelFailure", "failures")):
        assert schemas[message]["properties"][number]["minimum"] == 0
