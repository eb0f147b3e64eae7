"""Options that several commands take."""

from pathlib import Path

import click

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
