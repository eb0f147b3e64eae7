"""The tables of the operator's commands."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import click

from profiles.text_formatting import counted, format_bytes, visible
from toolkit.coordinator.database.operator_log import AuditEntry
from toolkit.coordinator.operation.messages import (
    AuditPage,
    DeviceDetail,
    DevicePage,
    FleetDevice,
    OperatorList,
)
from toolkit.terminal_output import filled, print_table, table

WIDTH = 80


def show_devices(page: DevicePage) -> None:
    """Print a part of the list of devices, and how many there are in each state."""
    rows = table("device", "name", "submodel", "state", "seen", "trained")
    for column in rows.columns[:4]:
        column.justify = "left"
    for device in page.devices:
        rows.add_row(
            device.device,
            visible(device.name),
            device.submodel,
            device.state,
            f"{_age(device.idle_s)} ago",
            str(device.rounds_trained),
        )
    if page.devices:
        print_table(rows)
    for device in page.devices:
        if device.note is not None:
            click.echo(filled(f"{device.device}: {device.note}", WIDTH, "  "))
    states = ", ".join(f"{count} {state}" for state, count in page.states.items())
    shown = f"{page.start + 1} to {page.start + len(page.devices)} shown"
    head = counted(page.total, "device")
    click.echo(f"{head}: {states}; {shown}" if page.devices else head)


def show_device(detail: DeviceDetail) -> None:
    """Print one device."""
    device = detail.device
    fetched, sent = format_bytes(device.bytes_down), format_bytes(device.bytes_up)
    lines = {
        "name": device.name,
        "kind": f"{device.kind}, trains {device.submodel}",
        "state": state_text(device),
        "seen": f"{_age(device.idle_s)} ago",
        "traffic": f"{fetched} fetched, {sent} sent",
        "machine": _machine(detail.machine),
        "trained": counted(device.rounds_trained, "round"),
    }
    if device.follows_key is not None:
        lines["key"] = "follows the new key" if device.follows_key else "has an earlier key"
    if detail.secret_until is not None:
        until = _time(detail.secret_until)
        lines["secret"] = f"asked for a new one; the old one is valid until {until} UTC"
    click.echo(device.device)
    for name, text in lines.items():
        click.echo(filled(f"  {name:<8} {text}", WIDTH, " " * 11))
    if detail.updates:
        rows = table("round", "samples", "steps", "first loss", "last loss")
        for update in detail.updates:
            losses = f"{update.loss_first:.4f}", f"{update.loss_last:.4f}"
            rows.add_row(str(update.round), str(update.samples), str(update.steps), *losses)
        print_table(rows)
    for entry in detail.audit:
        click.echo(_entry(entry))


def show_audit(page: AuditPage) -> None:
    """Print entries of the audit log."""
    for entry in page.entries:
        click.echo(_entry(entry))
    if not page.entries:
        click.echo("The operator has not acted yet." if page.last == 0 else "No later entries.")
    elif page.entries[-1].number < page.last:
        click.echo(f"{page.last} entries in all; continue with --after {page.entries[-1].number}.")


def show_operators(shown: OperatorList) -> None:
    """Print who has a token."""
    rows = table("operator", "role", "made", "revoked")
    for column in rows.columns:
        column.justify = "left"
    for known in shown.operators:
        revoked = "" if known.revoked is None else _time(known.revoked)
        rows.add_row(known.name, known.role, _time(known.made), revoked)
    if shown.operators:
        print_table(rows)
    else:
        click.echo("No tokens were made; operator.token is the only one.")


def state_text(device: FleetDevice) -> str:
    """The state of a device with its note.

    If the operator has decided about the device, the note already begins with the state. Then only
    the note is returned.
    """
    if device.note is None:
        return device.state
    return device.note if device.decision else f"{device.state} ({device.note})"


def _machine(machine: Mapping[str, Any]) -> str:
    known = {name: value for name, value in machine.items() if value is not None}
    if "cpu_count" in known:
        known["cpu_count"] = counted(known["cpu_count"], "core")
    if "memory_bytes" in known:
        known["memory_bytes"] = format_bytes(known["memory_bytes"])
    if "python" in known:
        known["python"] = f"Python {known['python']}"
    return ", ".join(map(str, known.values()))


def _entry(entry: AuditEntry) -> str:
    head = f"{entry.number:>4}  {_time(entry.at)}  {entry.who}"
    return filled(f"{head}: {entry.action} {entry.target}: {entry.reason}", WIDTH, " " * 6)


def _time(at: float) -> str:
    """A time in seconds since 1970, in UTC to the minute."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}"


def _age(seconds: float) -> str:
    """A time span in its largest unit.

    Examples:
        >>> _age(7.2), _age(130), _age(7300), _age(200_000)
        ('7 s', '2 min', '2 h', '2 d')
    """
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"
