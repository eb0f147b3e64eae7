"""What `serve` tells the operator when it starts, and the files of tokens that it names."""

from pathlib import Path

from device_agent.formats.atomic_files import shown
from toolkit.coordinator.federation_config import CoordinatorConfig

OPERATOR = "operator.token"


def token_file(state: Path, kind: str) -> Path:
    """The join token of a kind of device, in the state folder."""
    return state / "tokens" / f"{kind}.token"


def startup_message(config: CoordinatorConfig, url: str) -> list[str]:
    """Address, join tokens, the operator's token, and which devices wait for a plan."""
    state = shown(config.state)
    devices = [
        f"  {kind.count} x {kind.name} ({kind.submodel}): {token_file(state, kind.name)}"
        for kind in config.devices
    ]
    lines = [
        f"Coordinator at {url}",
        "API reference at /docs (loads its style from a CDN) and /openapi.json.",
        f"Join: edgetailor-agent join {url} --token-file FILE",
        *devices,
        f"The operator's token, for /v1/status: {state / OPERATOR}",
    ]
    planned = [kind.name for kind in config.devices if kind.planned]
    if planned:
        waiting = ", ".join(planned)
        lines.append(f"Planning first: devices of kind {waiting} wait; others may join.")
    return lines
