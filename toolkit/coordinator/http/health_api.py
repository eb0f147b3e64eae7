"""Routes for programs that watch the coordinator: its health, and its figures for Prometheus."""

from typing import Literal

from fastapi import APIRouter, Depends, Request, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST

from device_agent.formats.protocol.problems import PREPARING, Problem
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.http.admission import CREDENTIALS, METRICS
from toolkit.coordinator.http.server_socket import HEALTH
from toolkit.coordinator.refusals import RefusalError

_bearer = HTTPBearer(auto_error=False, description=CREDENTIALS)
router = APIRouter()


@router.get(
    HEALTH,
    summary="Is it alive?",
    description="Also while the coordinator starts. Needs no credentials.",
)
async def health() -> Literal["ok"]:
    """Answer while the coordinator runs."""
    return "ok"


@router.get(
    "/readyz",
    summary="Can devices join and train?",
    description="Needs no credentials.",
    responses={503: {"model": Problem, "description": "The first bundles are being prepared"}},
)
def ready(request: Request) -> Literal["ok"]:
    """Answer when devices of some kind can join, or when the rounds are over."""
    coordinator: Coordinator = request.app.state.coordinator
    if not coordinator.is_ready():
        raise RefusalError(
            "The coordinator prepares its first bundles. Ask again.",
            status=503,
            code=PREPARING,
        )
    return "ok"


@router.get(
    METRICS,
    dependencies=[Depends(_bearer)],
    summary="Figures for Prometheus",
    description="The rounds, devices, traffic and quality, in Prometheus' text format. Needs an "
    "operator's token.",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
)
def metrics(request: Request) -> Response:
    """Give all figures."""
    coordinator: Coordinator = request.app.state.coordinator
    return Response(coordinator.metrics(), media_type=CONTENT_TYPE_LATEST)
