"""The operator's pages: overview, devices, one device, unused updates, audit log."""

import re
from dataclasses import asdict
from typing import Annotated, get_args
from urllib.parse import urlencode

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from toolkit.coordinator.database.settings_log import changes_model
from toolkit.coordinator.federation_source import FILE
from toolkit.coordinator.http.operator_page.charts import loss_chart, machine_rows, quality_chart
from toolkit.coordinator.http.operator_page.forms import offered
from toolkit.coordinator.http.operator_page.page_answers import coordinator_of, shown
from toolkit.coordinator.operation.messages import Sort
from toolkit.coordinator.refusals import RefusalError, unusable

PAGE_SIZE = 50
"""How many rows of a table a page has."""
MOST_UNUSED = 200
"""How many of the newest unused updates are shown."""


class Query(msgspec.Struct, frozen=True):
    """The query of the list of devices. Empty texts choose all devices."""

    start: Annotated[int, Meta(ge=0, lt=2**53)] = 0
    kind: Annotated[str, Meta(max_length=100)] = ""
    state: Annotated[str, Meta(max_length=100)] = ""
    search: Annotated[str, Meta(max_length=100)] = ""
    sort: Sort = "joined"
    descending: bool = False

    def with_(self, **changed: object) -> str:
        """This query with some changed values, as the part of a URL after `?`."""
        values = msgspec.structs.asdict(msgspec.structs.replace(self, **changed))
        unlike = {k: v for k, v in values.items() if v != getattr(Query(), k)}
        return urlencode({k: "true" if v is True else v for k, v in unlike.items()})


def overview(request: Request) -> Response:
    """Show the round, its missing devices, the quality and the warnings."""
    coordinator = coordinator_of(request)
    quality = coordinator.quality()
    return shown(
        request,
        "overview.html",
        now=coordinator.overview(),
        quality=quality,
        curve=quality_chart(quality),
        kept=sorted(coordinator.store.history.kept_rounds(), reverse=True),
    )


def public(request: Request) -> Response:
    """Show everybody the round and the quality, but no devices."""
    coordinator = coordinator_of(request)
    quality, now = coordinator.quality(), coordinator.overview()
    return shown(
        request,
        "public.html",
        title=coordinator.config.title or "Federation",
        purpose=coordinator.config.purpose,
        contact=coordinator.config.contact,
        now=now,
        devices=sum(now.states.values()),
        quality=quality,
        curve=quality_chart(quality),
    )


def devices(request: Request) -> Response:
    """Show a part of the fleet as a table."""
    coordinator = coordinator_of(request)
    try:
        query = msgspec.convert(dict(request.query_params), Query, strict=False)
    except msgspec.ValidationError as error:
        raise unusable("{why}.", code="client.bad-request", why=str(error)) from None
    found = coordinator.device_page(
        query.start,
        PAGE_SIZE,
        query.kind or None,
        query.state or None,
        query.search or None,
        query.sort,
        query.descending,
    )
    return shown(
        request,
        "devices.html",
        query=query,
        page=found,
        size=PAGE_SIZE,
        kinds=[kind.name for kind in coordinator.config.devices],
        states=sorted({query.state} - {""} | coordinator.states().keys()),
        sorts=get_args(Sort),
    )


def device(request: Request) -> Response:
    """Show one device."""
    coordinator = coordinator_of(request)
    detail = coordinator.device_detail(request.path_params["device"])
    return shown(
        request,
        "device.html",
        detail=detail,
        device=detail.device,
        actions=offered(detail.device),
        machine=machine_rows(detail),
        curve=loss_chart(detail),
        profile=next(reversed(coordinator.store.records.profiles(detail.device.device)), None),
        open_round=coordinator.open_update(detail.device.device),
    )


def unused(request: Request) -> Response:
    """Show the updates that were left out or limited, with the reasons."""
    coordinator = coordinator_of(request)
    history = coordinator.store.history.results()[::-1]
    rows = [(r.round, device, reason) for r in history for device, reason in r.left_out.items()]
    limited = [(r.round, device, own.text()) for r in history for device, own in r.limited.items()]
    return shown(
        request,
        "unused.html",
        rows=rows[:MOST_UNUSED],
        total=len(rows),
        limited=limited[:MOST_UNUSED],
        total_limited=len(limited),
        excluded=coordinator.store.suspicions.left_out,
    )


def tokens(request: Request) -> Response:
    """Show the join tokens."""
    coordinator = coordinator_of(request)
    return shown(
        request,
        "tokens.html",
        tokens=coordinator.join_token_list().tokens,
        kinds=[kind.name for kind in coordinator.config.devices],
        days=coordinator.config.token_days,
    )


def settings(request: Request) -> Response:
    """Show the settings, and the changes in the federation's file."""
    coordinator = coordinator_of(request)
    found, problem, waiting = None, None, coordinator.new_settings
    try:
        carries = waiting is not None and changes_model(waiting.changes)
        found = coordinator.settings_changes(carries)
    except RefusalError as error:
        problem = str(error)
    training = asdict(coordinator.config.training)
    return shown(
        request,
        "settings.html",
        file=coordinator.store.value(FILE),
        found=found,
        problem=problem,
        waiting=[] if waiting is None else waiting.changes,
        waiting_round=None if waiting is None else waiting.round,
        key=coordinator.key_state(),
        training={key: value for key, value in training.items() if value not in (None, (), "")},
        before=sorted(coordinator.store.settings.by_round().items(), reverse=True),
    )


def audit(request: Request) -> Response:
    """Show the audit log, the newest entries first."""
    coordinator = coordinator_of(request)
    last = coordinator.store.operator_log.last()
    before = request.query_params.get("before", "")
    newest = min(int(before) - 1, last) if re.fullmatch("[0-9]{1,18}", before) else last
    after = max(newest - PAGE_SIZE, 0)
    entries = coordinator.audit_page(after, newest - after).entries if newest > 0 else []
    return shown(request, "audit.html", entries=entries[::-1], last=last, after=after)
