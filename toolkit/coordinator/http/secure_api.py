"""The routes of secure sums, see device_agent/formats/protocol/secure_sums.py.

A masked update itself comes as tensors: `PUT /rounds/{round}/tensors/{sha256}`.
"""

from typing import Annotated

from fastapi import APIRouter, Depends

from device_agent.formats.protocol.problems import API
from device_agent.formats.protocol.secure_sums import (
    SUM_ROUTES,
    SecureConfirmation,
    SecureInput,
    SecureKeys,
    SecureShares,
    SecureStep,
    SecureUnmasking,
)
from toolkit.coordinator.http.device_routes import CONFLICT, DEVICE_ANSWERS, Caller, Service
from toolkit.coordinator.http.strict_json import body_of, described

PATH = "/rounds/{round}/sum"
router = APIRouter(prefix=f"{API}{PATH}", responses=DEVICE_ANSWERS)


@router.get(
    "",
    summary="Ask for the next step of a secure sum",
    description="What this device does next, so that its update gets into the sum of the round, "
    "and nobody learns the update.",
)
def step(round: int, device: Caller, service: Service) -> SecureStep:
    """Give the device its next step."""
    return service.secure_step(device, round)


@router.post(
    f"/{SUM_ROUTES[SecureKeys]}",
    summary="Offer keys for a secure sum",
    description="The device has trained, and takes part with these keys. Later keys replace them "
    "until the round closes.",
    status_code=204,
    responses=CONFLICT,
    openapi_extra=described(SecureKeys),
)
def keys(
    round: int,
    body: Annotated[SecureKeys, Depends(body_of(SecureKeys))],
    device: Caller,
    service: Service,
) -> None:
    """Take the keys of a device."""
    service.secure_keys(device, round, body)


@router.post(
    f"/{SUM_ROUTES[SecureShares]}",
    summary="Share secrets",
    description="Shares of the device's secrets, encrypted for its neighbours in the group.",
    status_code=204,
    responses=CONFLICT,
    openapi_extra=described(SecureShares),
)
def shares(
    round: int,
    body: Annotated[SecureShares, Depends(body_of(SecureShares))],
    device: Caller,
    service: Service,
) -> None:
    """Take the shares of a device."""
    service.secure_shares(device, round, body)


@router.post(
    f"/{SUM_ROUTES[SecureInput]}",
    summary="Name the masked update",
    description="The masked update was sent as tensors with this SHA-256.",
    status_code=204,
    responses=CONFLICT,
    openapi_extra=described(SecureInput),
)
def masked(
    round: int,
    body: Annotated[SecureInput, Depends(body_of(SecureInput))],
    device: Caller,
    service: Service,
) -> None:
    """Take the masked update of a device."""
    service.secure_input(device, round, body)


@router.post(
    f"/{SUM_ROUTES[SecureConfirmation]}",
    summary="Confirm who is in the sum",
    description="The device's signature of the list of devices whose masked updates have come.",
    status_code=204,
    responses=CONFLICT,
    openapi_extra=described(SecureConfirmation),
)
def confirmation(
    round: int,
    body: Annotated[SecureConfirmation, Depends(body_of(SecureConfirmation))],
    device: Caller,
    service: Service,
) -> None:
    """Take the confirmation of a device."""
    service.secure_confirmation(device, round, body)


@router.post(
    f"/{SUM_ROUTES[SecureUnmasking]}",
    summary="Give shares of secrets",
    description="Shares that remove the masks of the sum. For each device, they are shares of only "
    "one of its secrets.",
    status_code=204,
    responses=CONFLICT,
    openapi_extra=described(SecureUnmasking),
)
def unmasking(
    round: int,
    body: Annotated[SecureUnmasking, Depends(body_of(SecureUnmasking))],
    device: Caller,
    service: Service,
) -> None:
    """Take shares with which masks are removed."""
    service.secure_unmasking(device, round, body)
