"""`edgetailor-agent`: the device's command line. It parses, calls the library and prints."""

import platform
import time
from pathlib import Path

import click
import msgspec

from device_agent.console import EXIT_CODES, run, say
from device_agent.wording import counted
from profiles.errors import InputError

threads_option = click.option(
    "--threads",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Threads of the runtime; 0: one for each core.",
)
data_option = click.option(
    "--data", required=True, help="Local data: FILE.npz with x and y, or module:callable."
)
state_option = click.option(
    "--state",
    type=click.Path(path_type=Path),
    help="The device's state folder.  [default: ~/.local/state/edgetailor-agent]",
)
seed_option = click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0, 2**31 - 1),
    help="Seed of the order of the samples and of dropout.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(epilog=EXIT_CODES, context_settings={"max_content_width": 100})
@click.version_option(package_name="edgetailor")
def main_group() -> None:
    """Train and profile bundles on this device, alone or in a federation.

    Alone: train a bundle folder that you copied here, and copy the update back. In a federation:
    join once, then run.
    """


@main_group.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@data_option
@click.option("--out", required=True, type=click.Path(path_type=Path), help="New update folder.")
@click.option(
    "--personal",
    type=click.Path(path_type=Path),
    help="The personal model of a cp or pfedme bundle: read if it exists, written after training.",
)
@click.option("--force", is_flag=True, help="Replace the update that is there.")
@threads_option
@seed_option
@json_option
def train(
    bundle: Path,
    data: str,
    out: Path,
    personal: Path | None,
    force: bool,
    threads: int,
    seed: int,
    as_json: bool,
) -> None:
    """Train BUNDLE on local data and write the update to send back.

    \b
    edgetailor-agent train bundles/phone --data local.npz --out update
    """
    from device_agent.alone import train_alone

    record = train_alone(
        bundle,
        data,
        out,
        personal,
        say,
        threads=threads,
        seed=seed,
        on_epoch=lambda epoch, epochs, loss: say(f"epoch {epoch} of {epochs}: loss {loss:.4f}"),
        force=force,
    )
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(record), indent=1))
    else:
        click.echo(
            f"{record.submodel}: {counted(record.steps, 'step')} on "
            f"{counted(record.samples, 'sample')}, loss {record.losses(4)}; update: {out}"
        )


@main_group.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@threads_option
@json_option
def profile(bundle: Path, threads: int, as_json: bool) -> None:
    """Measure BUNDLE's forward and backprop time per step and its memory on this device."""
    from device_agent.profiler import profile_bundle, summary

    found = profile_bundle(bundle, threads)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=1))
    else:
        click.echo("\n".join(summary(found)))


@main_group.command()
@click.argument("url")
@click.option(
    "--token-file", required=True, type=click.Path(path_type=Path), help="File with a join token."
)
@click.option("--name", default=platform.node, help="What to call this device.  [default: host]")
@state_option
def join(url: str, token_file: Path, name: str, state: Path | None) -> None:
    """Enrol this device with the coordinator at URL."""
    from device_agent.device import join as join_coordinator
    from device_agent.device_state import default_state

    try:
        token = token_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The token file {token_file} cannot be read: {error}.") from None
    folder = state or default_state()
    identity = join_coordinator(url, token, name, folder, say)
    where = "" if state is None else f" --state {state}"
    click.echo(f"{identity.device}: now edgetailor-agent run --data FILE.npz{where}")


@main_group.command("run")
@data_option
@state_option
@threads_option
@seed_option
def run_command(data: str, state: Path | None, threads: int, seed: int) -> None:
    """Take part in every round until the last, waiting for the coordinator where it is away."""
    from device_agent.device import run as run_device
    from device_agent.device_state import default_state

    started = time.monotonic()

    def log(line: str) -> None:
        say(f"[{time.monotonic() - started:7.1f} s] {line}")

    taken = run_device(state or default_state(), data, log, threads=threads, seed=seed)
    click.echo(f"{counted(taken, 'update')} sent")


@main_group.command()
@state_option
@json_option
def status(state: Path | None, as_json: bool) -> None:
    """Show the federation as the coordinator sees it."""
    from device_agent.device_state import default_state
    from device_agent.status import fleet_status, lines

    found = fleet_status(state or default_state(), say)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=1))
    else:
        click.echo("\n".join(lines(found)))


def main() -> None:
    """Entry point of `edgetailor-agent`."""
    run(main_group, "edgetailor-agent")


if __name__ == "__main__":
    main()
