"""The coordinator over HTTP: the routes of device_agent/formats/protocol/."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Depends, FastAPI, Header, Request
from fastapi import Path as PathParameter
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from device_agent.formats.evaluation_counts import Judgement
from device_agent.formats.manifest import Manifest
from device_agent.formats.protocol.fleet import (
    FederatedEvaluation,
    HeldOutFigures,
    Limited,
    Status,
)
from device_agent.formats.protocol.joining import Invitation, JoinReply, JoinRequest, NewSecret
from device_agent.formats.protocol.key_changes import KeyChanges
from device_agent.formats.protocol.problems import API, KEY_CHANGES, NO_SUCH_FILE, Problem
from device_agent.formats.protocol.releases import ReleaseReport
from device_agent.formats.protocol.rounds import (
    Fallback,
    Progress,
    Receipt,
    Stopped,
    SubmodelFailure,
    Work,
)
from device_agent.formats.protocol.secure_sums import (
    SecureConfirmation,
    SecureInput,
    SecureKeys,
    SecureShares,
    SecureUnmasking,
)
from device_agent.formats.protocol.transfers import Upload
from device_agent.formats.update import UpdateRecord
from profiles.json_decoding import build_decoders
from toolkit.aggregation.limits.reference import Reference
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.http import health_api, operator_api, secure_api
from toolkit.coordinator.http.byte_ranges import ByteRange, etag
from toolkit.coordinator.http.device_routes import (
    CONFLICT,
    DEVICE_ANSWERS,
    Caller,
    JoinToken,
    Service,
    caller_of,
)
from toolkit.coordinator.http.operator_page.routes import add_operator_page
from toolkit.coordinator.http.problem_answers import answer_problems
from toolkit.coordinator.http.strict_json import body_of, described, schemas
from toolkit.coordinator.operation.messages import (
    EarlierModel,
    NewDeadline,
    NewDeviceSecret,
    NewJoinToken,
    NewKey,
    NewOperator,
    Order,
    SettingsOrder,
)
from toolkit.coordinator.refusals import RefusalError, cut_off
from toolkit.coordinator.rounds.upload_validation import too_large
from toolkit.web.built_page import Page
from toolkit.web.static_files import join_routes

MESSAGES = [
    *(JoinRequest, Judgement, NewSecret, Progress, ReleaseReport, Stopped, SubmodelFailure),
    *(SecureConfirmation, SecureInput, SecureKeys, SecureShares, SecureUnmasking, UpdateRecord),
    *(EarlierModel, NewDeadline, NewDeviceSecret, NewJoinToken, NewKey, NewOperator),
    *(Order, SettingsOrder),
]
"""The types of the bodies that msgspec decodes instead of FastAPI."""
DOCUMENTS = [FederatedEvaluation, HeldOutFigures, Limited, Manifest, Reference]
"""Further types that several threads decode, from files and from the database."""
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


Sha256 = Annotated[str, PathParameter(pattern="^[0-9a-f]{64}$")]

router = APIRouter(prefix=API, responses=DEVICE_ANSWERS)


@router.get(
    "/invitation",
    summary="See what a join token is for",
    description="What the federation says about itself, and its rounds and their traffic.",
    responses={403: {"model": Problem, "description": "This is not a join token"}},
)
def invitation(token: JoinToken, service: Service) -> Invitation:
    """Describe the federation to the holder of a join token."""
    return service.invitation(token)


@router.get(
    KEY_CHANGES,
    summary="Ask for changes of the coordinator's key",
    description="For a device or the holder of a join token that knows an earlier key. Each change "
    "is signed with the key that was replaced.",
)
def key_changes(caller: Annotated[object, Depends(caller_of)], service: Service) -> KeyChanges:
    """List the changes of the key."""
    return service.signed_key_changes()


@router.post(
    "/devices",
    summary="Join",
    description="Enrol a device with a join token. The secret in the reply is given once; joining "
    "again with the same key gives the same device and a new secret.",
    responses={
        403: {
            "model": Problem,
            "description": "`code` is one of join.unknown-token, join.expired-token, "
            "join.used-up-token, join.other-kind, join.bad-signature, join.skewed-clock, "
            "join.used-request",
        },
        409: {"model": Problem, "description": "The device needs a profile, or nothing fits it"},
        503: {"model": Problem, "description": "The plan is still being made: ask again"},
    },
    openapi_extra=described(JoinRequest),
)
def join(
    body: Annotated[JoinRequest, Depends(body_of(JoinRequest))],
    token: JoinToken,
    service: Service,
) -> JoinReply:
    """Enrol a device."""
    return service.join(token, body)


@router.get(
    "/work",
    summary="Ask for work",
    description="What this device should do now; ask again after training, or while waiting.",
)
def work(device: Caller, service: Service) -> Work:
    """Give the device its next task."""
    return service.work(device)


@router.get(
    "/files/{sha256}",
    summary="Fetch a file",
    description="The bytes of one file of the bundle that this device is offered now. `Range: "
    "bytes=N-` or `bytes=N-M`, with an `If-Range` that is absent or the file's `ETag`, fetches a "
    "part of it. Other ranges are ignored.",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"application/octet-stream": {}}},
        206: {"content": {"application/octet-stream": {}}, "description": "The range"},
        404: {"model": Problem, "description": "This device is offered no such file now"},
        416: {"model": Problem, "description": "The file ends before this range"},
    },
)
def file(
    sha256: str,
    device: Caller,
    service: Service,
    range: Annotated[str | None, Header()] = None,
    if_range: Annotated[str | None, Header()] = None,
) -> StreamingResponse:
    """Stream one file, or a range of it."""
    path, size = service.file(device, sha256)
    part = ByteRange.of(range, if_range, etag(sha256), size)
    opened = _opened(path)
    service.count_fetched(device, part.length)
    return StreamingResponse(
        part.pieces(opened),
        status_code=part.status,
        media_type="application/octet-stream",
        headers={"Accept-Ranges": "bytes", "ETag": etag(sha256), **part.headers},
    )


def _opened(path: Path) -> BinaryIO:
    # Opened before the answer starts. The end of the round may remove the file, but not its data.
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise RefusalError(
            "The round of this file is over.", status=404, code=NO_SUCH_FILE
        ) from None


@router.post(
    "/progress",
    summary="Report progress",
    description="What the device is doing, for the status of the fleet.",
    status_code=204,
    openapi_extra=described(Progress),
)
def progress(
    body: Annotated[Progress, Depends(body_of(Progress))], device: Caller, service: Service
) -> None:
    """Record what the device is doing."""
    service.progress(device, body)


@router.post(
    "/problems",
    summary="Report that training fails",
    description="The device cannot train its submodel. If its kind has a fallback, the reply names "
    "the fallback and the first round in which the device trains it.",
    openapi_extra=described(SubmodelFailure),
)
def problem(
    body: Annotated[SubmodelFailure, Depends(body_of(SubmodelFailure))],
    device: Caller,
    service: Service,
) -> Fallback:
    """Record that a device cannot train its submodel."""
    return service.submodel_failed(device, body)


@router.post(
    "/stopped",
    summary="Report that the device stops",
    description="The device ends its work now, for this reason. No round waits for it until it "
    "asks for work again.",
    status_code=204,
    openapi_extra=described(Stopped),
)
def stopped(
    body: Annotated[Stopped, Depends(body_of(Stopped))], device: Caller, service: Service
) -> None:
    """Record that a device stops."""
    service.stopped(device, body)


@router.post(
    "/secret",
    summary="Make a new secret",
    description="For a device whose work has a challenge in `new_secret`. After this request, its "
    "old secret is void.",
    status_code=204,
    responses=CONFLICT,
    openapi_extra=described(NewSecret),
)
def new_secret(
    body: Annotated[NewSecret, Depends(body_of(NewSecret))], device: Caller, service: Service
) -> None:
    """Replace a device's secret."""
    service.take_secret(device, body)


@router.post(
    "/leave",
    summary="Leave",
    description="End this device's membership: its secret is void and its place is free.",
    status_code=204,
)
def leave(device: Caller, service: Service) -> None:
    """End a membership."""
    service.leave(device)


@router.get(
    "/rounds/{round}/tensors/{sha256}",
    summary="Ask how much of the tensors has come",
    description="How many bytes of the tensors with this SHA-256 the coordinator has. A request of "
    "this device that is still sending tensors is ended.",
    responses=CONFLICT,
)
def upload(round: int, sha256: Sha256, device: Caller, service: Service) -> Upload:
    """Tell how many bytes have come."""
    return service.upload(device, round, sha256)


@router.put(
    "/rounds/{round}/tensors/{sha256}",
    summary="Send the tensors",
    description="The bytes of update.safetensors, whose SHA-256 is in the path. `Upload-Offset` "
    "continues an upload that broke off: the body has the bytes after that offset. A "
    "device has one upload at a time; the last request wins. The update counts after "
    "its update.json has come.",
    status_code=204,
    responses=CONFLICT | {413: {"model": Problem, "description": "More than the bundle needs"}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string"}}},
        }
    },
)
async def put_tensors(
    round: int,
    sha256: Sha256,
    request: Request,
    device: Caller,
    service: Service,
    upload_offset: Annotated[str, Header(pattern=r"^[0-9]{1,18}$")] = "0",
) -> None:
    """Stream the tensors to disk."""
    offset = int(upload_offset)
    opened = await run_in_threadpool(service.open_upload, device, round, sha256, offset)
    with opened as received:
        async for piece in _body(request):
            if not received.write(piece):
                received.discard()
                raise too_large(received.limit)
        await run_in_threadpool(service.keep_upload, device, round, received)


@router.post(
    "/rounds/{round}/update",
    summary="Send the update",
    description="update.json, after its tensors. The same update may be sent again.",
    responses=CONFLICT,
    openapi_extra=described(UpdateRecord),
)
async def post_update(round: int, request: Request, device: Caller, service: Service) -> Receipt:
    """Check the update and count it."""
    body = await request.body()  # limited by RequestLimits
    return await run_in_threadpool(service.take_update, device, round, body)


@router.post(
    "/rounds/{round}/evaluation",
    summary="Judge the last model",
    description="After the last round: how this device predicts its held-out samples with the "
    "offered model. The same judgement may be sent again.",
    responses=CONFLICT,
    openapi_extra=described(Judgement),
)
def post_evaluation(
    round: int,
    body: Annotated[Judgement, Depends(body_of(Judgement))],
    device: Caller,
    service: Service,
) -> Receipt:
    """Check the judgement and count it."""
    return service.take_judgement(device, round, body)


async def _body(request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect:
        raise cut_off() from None


@router.post(
    "/releases/{number}",
    summary="Report what was done with a release",
    description="Whether the device predicts with the release that it was offered, why not, and "
    "what it counted in its trial. The same report may be sent again; a later one replaces it.",
    status_code=204,
    responses=CONFLICT,
    openapi_extra=described(ReleaseReport),
)
def release_report(
    number: int,
    body: Annotated[ReleaseReport, Depends(body_of(ReleaseReport))],
    device: Caller,
    service: Service,
) -> None:
    """Record what a device did with a release."""
    service.take_release_report(device, number, body)


@router.get(
    "/status",
    summary="See the fleet",
    description="Devices, rounds and the quality of the model, for devices and the operator.",
)
def status(caller: Annotated[object, Depends(caller_of)], service: Service) -> Status:
    """Return the status of the whole fleet."""
    return service.status()


class _DescribedApp(FastAPI):
    """An app that writes its OpenAPI document when somebody first asks for it.

    The document takes 0.2 s of processor time, and the rest of the app about 0.002 s.
    """

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            super().openapi()["components"]["schemas"] |= schemas(MESSAGES)
        return super().openapi()


def create_app(
    coordinator: Coordinator, lifespan: Lifespan | None = None, page: Page | None = None
) -> FastAPI:
    """Create the app that serves `coordinator`, and the files of `page` to phones and the operator.

    The app must run behind RequestLimits, which checks credentials. The reference is at /docs.
    """
    build_decoders([*MESSAGES, *DOCUMENTS])
    app = _DescribedApp(
        title="EdgeTailor coordinator",
        description="Devices enrol, fetch bundles, train them and send updates back.",
        version="1",
        lifespan=lifespan,
    )
    app.state.coordinator = coordinator
    # `include_router` would build every route again, in 0.05 s of the first request to each app.
    for part in (router, secure_api.router, operator_api.router, health_api.router):
        app.router.routes.extend(part.routes)
    add_operator_page(app, page)
    if coordinator.config.phones:
        app.router.routes.extend(join_routes(page))
    answer_problems(app)
    return app
