"""`edgetailor serve`: run the coordinator of a federation."""

from pathlib import Path

import click

from toolkit.cli.early_checks import check_model


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--check-models",
    is_flag=True,
    help="Read every kept model and compare it with its hash. By default only the newest and the "
    "best are read, and of the others the size is checked.",
)
def serve(config: Path, check_models: bool) -> None:
    """Run the coordinator of the federation in CONFIG (TOML).

    Runs until interrupted. Writes a join token for each kind of device to the state folder. Copy it
    to the device and run there: edgetailor-agent join URL --token-file FILE. The HTTP interface is
    documented at URL/docs.
    """
    from toolkit.coordinator.federation_config import load_config

    found = load_config(config)
    check_model(found.model, found.weights)

    from toolkit.coordinator.server import serve as serve_config

    serve_config(config, check_models)
