"""`edgetailor demo`: a federation of eight devices on this machine."""

import json
from dataclasses import dataclass
from pathlib import Path

import click

from toolkit.cli.options import JSON_HELP, SEED, option, takes
from toolkit.demo.demo_folder import DemoFolder
from toolkit.terminal_output import show_stages


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options of `demo`."""

    out: Path = option("Folder for all files of the demo.", default="edgetailor-demo")
    rounds: int = option("Number of rounds.", default=12, type=click.IntRange(1))
    seed: int = option("Seed of the data split and of the training.", default=0, type=SEED)
    all_full: bool = option("Give every device the full model.")
    force: bool = option("Replace the folder of an earlier demo.")
    as_json: bool = option(JSON_HELP, "--json")


@click.command()
@takes(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Run a federation of eight devices on this machine.

    One coordinator and eight agents run here as processes. The devices are of four kinds. The data
    are the 1,797 handwritten digits of scikit-learn, split unevenly over the devices. The result is
    compared with a fleet of full models and with devices that train alone. The demo takes a few
    minutes.
    """
    DemoFolder(options.out).check_place(options.force)

    show_stages()

    from toolkit.demo.demo_table import as_json, show
    from toolkit.demo.run_demo import run_demo

    result = run_demo(
        options.out,
        rounds=options.rounds,
        seed=options.seed,
        all_full=options.all_full,
        force=options.force,
    )
    if options.as_json:
        click.echo(json.dumps(as_json(result), indent=1))
    else:
        show(result)
