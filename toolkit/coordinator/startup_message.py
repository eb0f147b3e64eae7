"""The lines that `serve` logs for the operator when it starts."""

from pathlib import Path

from device_agent.formats.atomic_files import shown
from toolkit.coordinator.federation_file.device_kinds import DeviceKind
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.join_links import (
    NEEDS_AUTHORITY,
    NEEDS_HTTPS,
    NO_PAGE,
    join_link,
    phones_accept,
    token_file,
)

OPERATOR = "operator.token"


def startup_message(
    config: CoordinatorConfig,
    url: str,
    origin: Path,
    has_page: bool,
    certificate: str | None = None,
) -> list[str]:
    """Address, join tokens, the operator's token, and the devices that wait for a plan.

    `origin` is the federation's file; `has_page` says whether the page for phones was built.
    `certificate` is the fingerprint of a self-signed certificate.
    """
    state = shown(config.state)
    devices = [
        f"  {_count(kind)} {kind.name} ({kind.submodel}): {token_file(state, kind.name)}"
        for kind in config.devices
    ]
    lines = [
        f"Coordinator at {url}",
        "API reference at /docs (loads its style from a CDN) and /openapi.json.",
        f"Join: edgetailor-agent join {url} --token-file FILE",
        *([f"  --certificate {certificate}"] if certificate else []),
        *devices,
        *(_phones(url, origin, has_page, certificate) if config.phones else []),
        f"Operator: {url}/ (token: {state / OPERATOR})",
    ]
    planned = [kind.name for kind in config.devices if kind.planned]
    if planned:
        waiting = ", ".join(planned)
        lines.append(f"Planning first: devices of kind {waiting} wait; others may join.")
    return lines


def _count(kind: DeviceKind) -> str:
    return "any number of" if kind.places is None else f"{kind.places} x"


def _phones(url: str, origin: Path, has_page: bool, certificate: str | None) -> list[str]:
    if not has_page:
        return [NO_PAGE]
    lines = [f"Phones: {join_link(url)}", f"  links with tokens: edgetailor tokens {shown(origin)}"]
    if certificate:
        return [*lines, f"  {NEEDS_AUTHORITY}"]
    return lines if phones_accept(url) else [*lines, f"  {NEEDS_HTTPS}"]
