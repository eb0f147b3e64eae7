"""The arguments that routes of devices need: the coordinator, and the sender of the request."""

from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from device_agent.formats.protocol.problems import Problem
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.database.device_registry import Device
from toolkit.coordinator.http.admission import CALLER, CREDENTIALS

_bearer = HTTPBearer(auto_error=False, description=CREDENTIALS)
CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {"model": Problem, "description": "The request does not fit the present state"},
}
DEVICE_ANSWERS: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "This token or secret is unknown"},
    422: {"model": Problem, "description": "The content of the request cannot be used"},
}


# Admission has checked the credentials before the body came. These functions are async: FastAPI
# runs other functions in a thread, which costs more than the functions themselves.
async def coordinator_of(request: Request) -> Coordinator:
    """The coordinator that answers."""
    coordinator: Coordinator = request.app.state.coordinator
    return coordinator


async def caller_of(request: Request, _: Annotated[object, Depends(_bearer)]) -> Device | str:
    """The device that has sent the request, or its token."""
    caller: Device | str = request.scope["state"][CALLER]
    return caller


Service = Annotated[Coordinator, Depends(coordinator_of)]
Caller = Annotated[Device, Depends(caller_of)]
JoinToken = Annotated[str, Depends(caller_of)]
