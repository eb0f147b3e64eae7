"""`edgetailor serve`: the coordinator."""

import logging
from pathlib import Path

import click


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
def serve(config: Path) -> None:
    """Coordinate rounds over HTTP as CONFIG (TOML) says.

    Runs until interrupted. Writes one join token for each kind of device under the state folder;
    hand it to the device: edgetailor-agent join URL --token-file FILE. The interface is described
    at URL/docs.
    """
    from toolkit.coordinator.server import serve as serve_config

    show_messages()
    serve_config(config)


def show_messages() -> None:
    """Write what the coordinator logs to stderr, unless a handler does so already."""
    logger = logging.getLogger("toolkit")
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
