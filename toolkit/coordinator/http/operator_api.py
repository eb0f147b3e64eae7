"""The operator's routes: see devices, act on them, read the audit log."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.security import HTTPBearer

from device_agent.formats.protocol.problems import Problem
from toolkit.coordinator.database.join_tokens import JoinTokenState
from toolkit.coordinator.database.operator_tokens import Operator
from toolkit.coordinator.http.admission import CALLER, CREDENTIALS, OPERATOR_ROUTES
from toolkit.coordinator.http.device_routes import Service
from toolkit.coordinator.http.strict_json import body_of, described
from toolkit.coordinator.operation.messages import (
    Action,
    AuditPage,
    DeviceDetail,
    DevicePage,
    EarlierModel,
    JoinTokenList,
    KeyState,
    MadeJoinToken,
    MadeOperator,
    ModelRound,
    NewDeadline,
    NewDeviceSecret,
    NewJoinToken,
    NewKey,
    NewOperator,
    OperatorList,
    Order,
    SettingsChanges,
    SettingsOrder,
    Sort,
)

MOST = 1000
"""The most devices or entries of one answer."""

_bearer = HTTPBearer(auto_error=False, description=CREDENTIALS)
router = APIRouter(
    prefix=OPERATOR_ROUTES.rstrip("/"),
    dependencies=[Depends(_bearer)],
    responses={
        401: {"model": Problem, "description": "This token is unknown"},
        403: {
            "model": Problem,
            "description": "The token is not an operator's, or it only reads",
        },
        404: {"model": Problem, "description": "There is no such device, token or kind"},
        422: {"model": Problem, "description": "The content of the request cannot be used"},
    },
)

_not_open: dict[int | str, dict[str, Any]] = {
    409: {"model": Problem, "description": "This round is not open, or has too few updates"}
}


def _who(request: Request) -> str:
    operator: Operator = request.scope["state"][CALLER]
    return operator.name


Who = Annotated[str, Depends(_who)]
"""The name of the operator, for the audit log."""
Ordered = Annotated[Order, Depends(body_of(Order))]
"""An action's reason."""
Start = Annotated[int, Query(ge=0, lt=2**53)]
Most = Annotated[int, Query(ge=1, le=MOST)]
Number = Annotated[int, Path(ge=1, lt=2**53)]
Text = Annotated[str | None, Query(max_length=100)]


@router.get(
    "/devices",
    summary="List devices",
    description="A part of the devices. `total` of them match `kind`, `state` and `search`, a text "
    "in their id or name. By default they are in the order in which they joined.",
)
def devices(
    service: Service,
    start: Start = 0,
    most: Most = 100,
    kind: Text = None,
    state: Text = None,
    search: Text = None,
    sort: Sort = "joined",
    descending: bool = False,
) -> DevicePage:
    """List devices."""
    return service.device_page(start, most, kind, state, search, sort, descending)


@router.get(
    "/devices/{device}",
    summary="See one device",
    description="Its state, its machine, its last updates, and what the operator did with it.",
)
def device(device: str, service: Service) -> DeviceDetail:
    """Show one device."""
    return service.device_detail(device)


@router.post(
    "/devices/{device}/secret",
    summary="Ask a device for a new secret",
    description="The device makes a new secret when it next asks for work. Then the old secret is "
    "void. If the device makes no new secret, the old secret is void after `days`. "
    "Repeating the request changes nothing.",
    responses={409: {"model": Problem, "description": "The device has left the federation"}},
    openapi_extra=described(NewDeviceSecret),
)
def rotate_secret(
    device: str,
    order: Annotated[NewDeviceSecret, Depends(body_of(NewDeviceSecret))],
    service: Service,
    who: Who,
) -> DeviceDetail:
    """Ask a device for a new secret, and show it."""
    service.rotate_secret(device, order.days, order.reason, who)
    return service.device_detail(device)


@router.post(
    "/devices/{device}/{action}",
    summary="Act on a device",
    description="`pause`: it gets no work, and keeps its place. `resume`: it takes part again. "
    "`remove`: its secret is void and its place is free. `ban`: its key cannot join again, "
    "either. `let-in`: the decision is lifted, and the device is a member again if a place is "
    "free. The reason stays in the audit log. Repeating an action changes nothing.",
    responses={409: {"model": Problem, "description": "The device has left the federation"}},
    openapi_extra=described(Order),
)
def act(
    device: str,
    action: Action,
    order: Ordered,
    service: Service,
    who: Who,
) -> DeviceDetail:
    """Act on a device, and show it."""
    service.act(action, device, order.reason, who)
    return service.device_detail(device)


@router.post(
    "/rounds/pause",
    summary="Pause the rounds",
    description="No round opens until they are resumed. The open round ends as usual.",
    status_code=204,
    openapi_extra=described(Order),
)
def pause_rounds(order: Ordered, service: Service, who: Who) -> None:
    """Pause the rounds."""
    service.pause_rounds(order.reason, who)


@router.post(
    "/rounds/resume",
    summary="Resume the rounds",
    description="Rounds open again.",
    status_code=204,
    openapi_extra=described(Order),
)
def resume_rounds(order: Ordered, service: Service, who: Who) -> None:
    """Resume the rounds."""
    service.resume_rounds(order.reason, who)


@router.post(
    "/rounds/{round}/abort",
    summary="Abort the open round",
    description="Its updates are dropped, and it opens again. A device that still has its update "
    "sends that again.",
    status_code=204,
    responses=_not_open,
    openapi_extra=described(Order),
)
def abort_round(round: int, order: Ordered, service: Service, who: Who) -> None:
    """Abort the open round."""
    service.abort_round(round, order.reason, who)


@router.post(
    "/rounds/{round}/updates/{device}/drop",
    summary="Take an update out of the open round",
    description="The round goes on without this device.",
    status_code=204,
    responses=_not_open,
    openapi_extra=described(Order),
)
def drop_update(
    round: int,
    device: str,
    order: Ordered,
    service: Service,
    who: Who,
) -> None:
    """Take an update out of the open round."""
    service.drop_update(round, device, order.reason, who)


@router.post(
    "/model",
    summary="Go back to an earlier model",
    description="The next round starts from the model after `round`; without `round`, the last "
    "round is repeated. Updates of the open round are dropped.",
    responses={409: {"model": Problem, "description": "There is no such model, or not now"}},
    openapi_extra=described(EarlierModel),
)
def go_back(
    order: Annotated[EarlierModel, Depends(body_of(EarlierModel))], service: Service, who: Who
) -> ModelRound:
    """Go back to an earlier model."""
    return ModelRound(round=service.go_back(order.round, order.reason, who))


@router.post(
    "/rounds/{round}/close",
    summary="Close the open round",
    description="It goes on with the updates that have come. The others are late.",
    status_code=204,
    responses=_not_open,
    openapi_extra=described(Order),
)
def close_round(round: int, order: Ordered, service: Service, who: Who) -> None:
    """Close the open round."""
    service.close_now(round, order.reason, who)


@router.post(
    "/rounds/{round}/deadline",
    summary="Move the deadline of the open round",
    description="The round ends this many seconds from now, or earlier if all updates have come.",
    status_code=204,
    responses=_not_open,
    openapi_extra=described(NewDeadline),
)
def move_deadline(
    round: int,
    order: Annotated[NewDeadline, Depends(body_of(NewDeadline))],
    service: Service,
    who: Who,
) -> None:
    """Move the deadline of the open round."""
    service.end_after(round, order.seconds, order.reason, who)


@router.get(
    "/audit",
    summary="Read the audit log",
    description="All actions of the operator after number `after`, the oldest first.",
)
def audit(service: Service, after: Start = 0, most: Most = 100) -> AuditPage:
    """Read the audit log."""
    return service.audit_page(after, most)


@router.get(
    "/operators",
    summary="List operators",
    description="The names and roles of all tokens that were made, also of revoked ones. The token "
    "in operator.token, whose name is `operator`, is not among them.",
)
def operators(service: Service) -> OperatorList:
    """List operators."""
    return service.operator_list()


@router.post(
    "/operators",
    summary="Make a token",
    description="For a person or program called `name`. With the role `read-only` it opens the "
    "routes that only show something. The answer has the token, once.",
    responses={409: {"model": Problem, "description": "The name was given before"}},
    openapi_extra=described(NewOperator),
)
def add_operator(
    order: Annotated[NewOperator, Depends(body_of(NewOperator))], service: Service, who: Who
) -> MadeOperator:
    """Make a token."""
    return service.add_operator(order.name, order.role, order.reason, who)


@router.post(
    "/operators/{name}/revoke",
    summary="Revoke a token",
    description="The token no longer gives access. Its name is not used again.",
    responses={409: {"model": Problem, "description": "This is the token in operator.token"}},
    openapi_extra=described(Order),
)
def revoke_operator(name: str, order: Ordered, service: Service, who: Who) -> Operator:
    """Revoke a token."""
    return service.revoke_operator(name, order.reason, who)


@router.get(
    "/join-tokens",
    summary="List join tokens",
    description="The token of each kind, without a number, and the tokens that operators have "
    "made. The answer does not have the tokens themselves.",
)
def join_tokens(service: Service) -> JoinTokenList:
    """List join tokens."""
    return service.join_token_list()


@router.post(
    "/join-tokens",
    summary="Make a join token",
    description="For at most `count` devices of a kind, for `days`. Their kind needs free places, "
    "too. The answer has the token, once; the link by which a phone joins is `/join/#TOKEN`.",
    openapi_extra=described(NewJoinToken),
)
def make_join_token(
    order: Annotated[NewJoinToken, Depends(body_of(NewJoinToken))], service: Service, who: Who
) -> MadeJoinToken:
    """Make a join token."""
    return service.make_join_token(order.kind, order.count, order.days, order.reason, who)


@router.post(
    "/join-tokens/{number}/revoke",
    summary="Revoke a join token",
    description="No device joins with it from now on. Devices that have joined with it stay.",
    openapi_extra=described(Order),
)
def revoke_join_token(number: Number, order: Ordered, service: Service, who: Who) -> JoinTokenState:
    """Revoke a join token."""
    return service.revoke_join_token(number, order.reason, who)


@router.get(
    "/key",
    summary="See the coordinator's key",
    description="The fingerprint of the key that signs the work of devices, and the earlier keys.",
)
def key_state(service: Service) -> KeyState:
    """Show the key's fingerprint."""
    return service.key_state()


@router.post(
    "/key",
    summary="Rotate the coordinator's key",
    description="A new key replaces the key with the fingerprint `key`. For `days`, devices and "
    "join tokens that know the old key can change to the new key, because the old key "
    "signs it. Repeating the request changes nothing.",
    responses={409: {"model": Problem, "description": "The coordinator has another key"}},
    openapi_extra=described(NewKey),
)
def rotate_key(
    order: Annotated[NewKey, Depends(body_of(NewKey))], service: Service, who: Who
) -> KeyState:
    """Rotate the key."""
    return service.rotate_key(order.key, order.days, order.reason, who)


_impossible: dict[int | str, dict[str, Any]] = {
    409: {"model": Problem, "description": "A change in the file is not possible"}
}


@router.get(
    "/settings",
    summary="See changes of the federation's file",
    description="How the file of `edgetailor serve` differs from the settings in effect, and from "
    "which round on the changes would take effect. Values are JSON texts. With `carry`, `model` "
    "may have changed; then `model.tensors` says what is carried over.",
    responses=_impossible,
)
def settings_changes(service: Service, carry: bool = False) -> SettingsChanges:
    """Compare the file with the settings in effect."""
    return service.settings_changes(carry)


@router.post(
    "/settings",
    summary="Apply the federation's file",
    description="Its changes take effect from the next round on. If a change would result in a "
    "different model or a different judgement, it is refused and nothing changes. With `carry`, "
    "`model` may have changed: tensors that fit by name and shape are carried over.",
    responses=_impossible,
    openapi_extra=described(SettingsOrder),
)
def apply_settings(
    order: Annotated[SettingsOrder, Depends(body_of(SettingsOrder))], service: Service, who: Who
) -> SettingsChanges:
    """Apply the file."""
    return service.apply_settings(order.reason, who, order.carry)
