"""`edgetailor`: the command line of the server side. Related commands share a file.

A command checks its arguments (`early_checks.py`), calls the library and prints the result. Modules
that import torch are imported inside the commands, after the checks: the import takes seconds.
"""

import os

import click

from device_agent import __version__
from device_agent.cli.console import EXIT_CODES, run
from device_agent.log_format import quieten_others
from toolkit.cli.aggregate_command import aggregate
from toolkit.cli.backup_commands import backup, restore
from toolkit.cli.compare_command import compare
from toolkit.cli.demo_command import demo
from toolkit.cli.deploy_command import deploy
from toolkit.cli.evaluate_command import evaluate
from toolkit.cli.export_command import export
from toolkit.cli.inspect_command import inspect
from toolkit.cli.operator.access_commands import COMMANDS as ACCESS_COMMANDS
from toolkit.cli.operator.open_round_commands import COMMANDS as ROUND_COMMANDS
from toolkit.cli.operator.operator_commands import COMMANDS as OPERATOR_COMMANDS
from toolkit.cli.operator.settings_commands import apply
from toolkit.cli.plan_command import plan
from toolkit.cli.release_command import release
from toolkit.cli.report_command import report
from toolkit.cli.rounds_commands import export_model, rollback, rounds
from toolkit.cli.serve_commands import serve, tls, tokens
from toolkit.cli.service_commands import COMMANDS as SERVICE_COMMANDS
from toolkit.cli.simulate_command import simulate


@click.group(epilog=EXIT_CODES, context_settings={"max_content_width": 100})
@click.version_option(__version__)
def main_group() -> None:
    """Cut one PyTorch model to fit every device, and aggregate what the devices train.

    MODEL is a reference like toolkit.models:resnet20: a function without arguments that returns an
    nn.Module. Modules in the current folder can be imported.

    A submodel SPEC is a family and its size. Options follow after commas:

    \b
        full                      the whole model
        low-rank:0.25             rank ratio; keep=, decay=
        slice:0.42                largest capacity; skip=, recording=, frozen=
        slice:blocks.3            first trained module; the same options
        slice:0.42+low-rank:0.25  a slice of low-rank layers
        cp:2.0                    compression rate; penalty=, personal-steps=,
                                  factor-steps=, factor-rate=, personal-start=
        width:0.5                 channel ratio; scaler=, window=
        depth:0.5                 share of the blocks of each stage
        pfedme                    the whole model and a personal one; penalty=,
                                  personal-steps=, local-rate=, personal-start=

    Every family takes recompute=. It says which activations a training step
    computes again to save memory: no (none), some (the default) or yes (as many
    as possible).
    """


for command in (
    *(aggregate, compare, demo, deploy, evaluate, export, inspect, plan, release, report),
    *(serve, simulate),
    *(tls, tokens),
    *(backup, restore, rounds, export_model, rollback),
    *OPERATOR_COMMANDS,
    *ROUND_COMMANDS,
    *ACCESS_COMMANDS,
    *SERVICE_COMMANDS,
    apply,
):
    main_group.add_command(command)


def main() -> None:
    """Entry point of `edgetailor`."""
    # Torch's C++ code writes warnings to stderr, past Python's logging.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    quieten_others()
    run(main_group, "edgetailor")
