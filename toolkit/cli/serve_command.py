"""`edgetailor serve`: the coordinator."""

from pathlib import Path

import click

from toolkit.cli.early_checks import check_model


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
def serve(config: Path) -> None:
    """Coordinate rounds over HTTP as CONFIG (TOML) says.

    Runs until interrupted. Writes one join token for each kind of device under the state folder;
    hand it to the device: edgetailor-agent join URL --token-file FILE. The interface is described
    at URL/docs.
    """
    from toolkit.coordinator.federation_config import load_config

    found = load_config(config)
    check_model(found.model, found.weights)

    from toolkit.coordinator.server import serve as serve_config

    serve_config(config)
