"""The command `edgetailor-agent train`."""

from pathlib import Path

import click

from device_agent.cli.console import print_json
from device_agent.cli.options import (
    data_option,
    json_option,
    max_memory_option,
    seed_option,
    threads_option,
    validation_option,
)
from profiles.text_formatting import counted


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@data_option
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Folder for the update."
)
@click.option(
    "--personal",
    type=click.Path(path_type=Path),
    help="The personal model of a cp or pfedme bundle: read if it exists, written after training.",
)
@click.option("--force", is_flag=True, help="Replace an update that is in the folder at --out.")
@validation_option
@max_memory_option
@threads_option
@seed_option
@json_option
def train(
    bundle: Path,
    data: str,
    out: Path,
    personal: Path | None,
    force: bool,
    validation: float,
    max_memory: int | None,
    threads: int,
    seed: int,
    as_json: bool,
) -> None:
    """Train BUNDLE on local data and write the update.

    If the training is interrupted or killed, the same command continues it.

    \b
        edgetailor-agent train bundles/phone --data local.npz --out update
    """
    import msgspec

    from device_agent.training.standalone_training import train as train_alone

    record = train_alone(
        bundle,
        data,
        out,
        personal=personal,
        threads=threads,
        seed=seed,
        validation=validation,
        max_memory=max_memory,
        force=force,
    )
    if as_json:
        print_json(msgspec.json.format(msgspec.json.encode(record), indent=1))
    else:
        # With privacy for samples, an update has no losses.
        loss = f", loss {record.losses(4)}" if record.loss_first or record.loss_last else ""
        click.echo(
            f"{record.submodel}: {counted(record.steps, 'step')} on "
            f"{counted(record.samples, 'sample')}{loss}; update: {out}"
        )
