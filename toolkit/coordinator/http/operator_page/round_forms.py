"""The forms of the operator's page that act on rounds and on the model."""

from starlette.requests import Request
from starlette.responses import Response

from toolkit.coordinator.http.admission import PAGES
from toolkit.coordinator.http.operator_page.forms import done, order_as
from toolkit.coordinator.http.operator_page.page_answers import coordinator_of, order_of
from toolkit.coordinator.operation.messages import EarlierModel, NewDeadline, Order


class RoundOrder(Order, frozen=True, kw_only=True):
    """An action on the round that the page showed as open."""

    round: int


class Minutes(RoundOrder, frozen=True, kw_only=True):
    """A new deadline of a round, in minutes from now."""

    minutes: float


async def pause(request: Request) -> Response:
    """Stop opening rounds."""
    order = order_as(Order, await order_of(request))
    return await done(
        request,
        PAGES,
        "No new round opens until you resume the rounds.",
        lambda who: coordinator_of(request).pause_rounds(order.reason, who),
    )


async def resume(request: Request) -> Response:
    """Open rounds again."""
    order = order_as(Order, await order_of(request))
    return await done(
        request,
        PAGES,
        "New rounds open again.",
        lambda who: coordinator_of(request).resume_rounds(order.reason, who),
    )


async def close(request: Request) -> Response:
    """Close the open round."""
    order = order_as(RoundOrder, await order_of(request))
    return await done(
        request,
        PAGES,
        f"Round {order.round} closes with the updates that have come.",
        lambda who: coordinator_of(request).close_now(order.round, order.reason, who),
    )


async def abort(request: Request) -> Response:
    """Drop the updates of the open round."""
    order = order_as(RoundOrder, await order_of(request))
    return await done(
        request,
        PAGES,
        f"Round {order.round} opens again without its updates.",
        lambda who: coordinator_of(request).abort_round(order.round, order.reason, who),
    )


async def move_deadline(request: Request) -> Response:
    """Move the deadline of the open round."""
    order = order_as(Minutes, await order_of(request))
    later = order_as(NewDeadline, {"seconds": 60 * order.minutes, "reason": order.reason})
    return await done(
        request,
        PAGES,
        f"Round {order.round} has a new deadline.",
        lambda who: coordinator_of(request).end_after(
            order.round, later.seconds, order.reason, who
        ),
    )


async def drop_update(request: Request) -> Response:
    """Take the update of a device out of the open round."""
    device = request.path_params["device"]
    order = order_as(RoundOrder, await order_of(request))
    return await done(
        request,
        f"{PAGES}devices/{device}",
        f"Round {order.round} goes on without the update of {device}.",
        lambda who: coordinator_of(request).drop_update(order.round, device, order.reason, who),
    )


async def go_back(request: Request) -> Response:
    """Go back to an earlier model."""
    order = order_as(EarlierModel, await order_of(request))
    return await done(
        request,
        PAGES,
        f"The next round starts from the model after round {order.round}.",
        lambda who: coordinator_of(request).go_back(order.round, order.reason, who),
    )
