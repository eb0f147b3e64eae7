"""`edgetailor demo`: a federation of eight devices on this machine."""

import json
from pathlib import Path

import click

from toolkit.cli.options import SEED
from toolkit.demo.demo_folder import DemoFolder
from toolkit.terminal_output import show_stages


@click.command()
@click.option(
    "--out",
    default="edgetailor-demo",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder for all files of the demo.",
)
@click.option(
    "--rounds", default=12, show_default=True, type=click.IntRange(1), help="Number of rounds."
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=SEED,
    help="Seed of the data split and of the training.",
)
@click.option("--all-full", is_flag=True, help="Give every device the full model.")
@click.option("--force", is_flag=True, help="Replace the folder of an earlier demo.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def demo(out: Path, rounds: int, seed: int, all_full: bool, force: bool, as_json: bool) -> None:
    """Run a federation of eight devices on this machine.

    One coordinator and eight agents run here as processes. The devices are of four kinds. The data
    are the 1,797 handwritten digits of scikit-learn, split unevenly over the devices. The result is
    compared with a fleet of full models and with devices that train alone. Takes a few minutes.
    """
    DemoFolder(out).check_place(force)

    show_stages()

    from toolkit.demo.demo_table import as_json as report_json
    from toolkit.demo.demo_table import show
    from toolkit.demo.run_demo import run_demo

    result = run_demo(out, rounds=rounds, seed=seed, all_full=all_full, force=force)
    if as_json:
        click.echo(json.dumps(report_json(result), indent=1))
    else:
        show(result)
