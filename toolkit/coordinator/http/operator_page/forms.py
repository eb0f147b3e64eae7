"""The forms of the operator's page that act on devices, join tokens and settings."""

import re
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import msgspec
import segno
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from device_agent.formats.protocol.fleet import ABSENT, LEFT
from toolkit.coordinator.http.admission import PAGES
from toolkit.coordinator.http.operator_page.page_answers import (
    coordinator_of,
    operator_of,
    order_of,
    session_of,
    shown,
    to,
)
from toolkit.coordinator.join_links import join_link
from toolkit.coordinator.operation.messages import (
    Action,
    FleetDevice,
    NewDeviceSecret,
    NewJoinToken,
    NewKey,
    Order,
)
from toolkit.coordinator.refusals import RefusalError, unusable

T = TypeVar("T", bound=Order)
DEVICE_ACTIONS: dict[Action, tuple[str, str]] = {
    "pause": (
        "Pause",
        "The device gets no work, but stays a member. If its update for the open round has come, "
        "the update counts.",
    ),
    "resume": ("Resume", "The device takes part again, also in the open round."),
    "remove": (
        "Remove",
        "The device is no longer a member: its secret is void, and another device can take its "
        "place. The removed device can join again with a join token.",
    ),
    "ban": (
        "Ban",
        "The device is removed, and its key cannot join again. Somebody who holds a join token can "
        "still join with a new key.",
    ),
    "let-in": (
        "Let in",
        "The removal or the ban is cancelled. If a place is free, the device is a member again. "
        "Otherwise it can join with a token.",
    ),
}
"""The label of the button of each action, and the effect of the action."""
DONE: dict[Action, str] = {
    "pause": "is paused",
    "resume": "takes part again",
    "remove": "is removed",
    "ban": "is banned",
    "let-in": "is let in again",
}


def offered(device: FleetDevice) -> list[tuple[Action, str, str]]:
    """The actions that change something for `device`, each with its button and its effect."""
    away = device.state in (LEFT, ABSENT)
    possible: dict[Action, bool] = {
        "pause": not away and device.decision != "paused",
        "resume": device.decision == "paused",
        "remove": device.state != LEFT,
        "ban": device.decision != "banned",
        "let-in": device.decision in ("removed", "banned"),
    }
    return [(name, *DEVICE_ACTIONS[name]) for name in DEVICE_ACTIONS if possible[name]]


async def act(request: Request) -> Response:
    """Act on a device."""
    device, action = request.path_params["device"], request.path_params["action"]
    if action not in get_args(Action):
        raise RefusalError(
            "There is no action {action!r}.",
            status=404,
            code="client.no-such-route",
            action=action[:64],
        )
    order = order_as(Order, await order_of(request))
    return await done(
        request,
        f"{PAGES}devices/{device}",
        f"{device} {DONE[action]}.",
        lambda who: coordinator_of(request).act(action, device, order.reason, who),
    )


async def rotate_secret(request: Request) -> Response:
    """Ask a device for a new secret."""
    device = request.path_params["device"]
    order = order_as(NewDeviceSecret, await order_of(request))
    return await done(
        request,
        f"{PAGES}devices/{device}",
        f"{device} is asked for a new secret.",
        lambda who: coordinator_of(request).rotate_secret(device, order.days, order.reason, who),
    )


async def make_token(request: Request) -> Response:
    """Make a join token, and show its link once."""
    given = {name: value for name, value in (await order_of(request)).items() if value}
    order, coordinator = order_as(NewJoinToken, given), coordinator_of(request)
    made = await run_in_threadpool(
        coordinator.make_join_token,
        order.kind,
        order.count,
        order.days,
        order.reason,
        operator_of(request).name,
    )
    link = join_link(str(request.base_url).rstrip("/"), made.token)
    code = segno.make(link).svg_inline(scale=5, dark="#000", light="#fff")
    return shown(request, "made_token.html", link=link, code=Markup(code), made=made)


async def revoke_token(request: Request) -> Response:
    """Revoke a join token."""
    given, order = request.path_params["number"], order_as(Order, await order_of(request))
    number = int(given) if re.fullmatch("[0-9]{1,18}", given) else 0  # no token has the number 0
    return await done(
        request,
        f"{PAGES}tokens",
        f"No more devices can join with token {number}.",
        lambda who: coordinator_of(request).revoke_join_token(number, order.reason, who),
    )


async def apply_settings(request: Request) -> Response:
    """Apply the changed file of the federation."""
    order = order_as(Order, await order_of(request))
    return await done(
        request,
        f"{PAGES}settings",
        "The changes take effect from the next round on.",
        lambda who: coordinator_of(request).apply_settings(order.reason, who),
    )


async def rotate_key(request: Request) -> Response:
    """Replace the coordinator's key."""
    order = order_as(NewKey, await order_of(request))
    return await done(
        request,
        f"{PAGES}settings",
        "The coordinator has a new key. Devices change to it when they next get work.",
        lambda who: coordinator_of(request).rotate_key(order.key, order.days, order.reason, who),
    )


async def done(request: Request, page: str, said: str, action: Callable[[str], object]) -> Response:
    """Carry out `action` of the operator. Then show `page`, with `said` or the refusal."""
    session = session_of(request)[1]
    try:
        await run_in_threadpool(action, operator_of(request).name)
    except RefusalError as error:
        session.notice = str(error), True
    else:
        session.notice = said, False
    return to(request, page)


def order_as(message: type[T], fields: dict[str, Any]) -> T:
    """The fields of a form as `message`. Raises RefusalError (422) if they cannot be used."""
    try:
        return msgspec.convert(fields, message, strict=False)
    except msgspec.ValidationError as error:
        raise unusable(
            "The form cannot be used: {why}.", code="client.bad-request", why=str(error)
        ) from None
