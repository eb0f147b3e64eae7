"""The export command that `edgetailor plan` suggests at its end."""

import shlex

import click

from toolkit.cli.options import HYPERPARAMETERS, repeated


def export_of(submodel: str, model: str, context: click.Context) -> str:
    """The command that exports the chosen submodel with the training options of the plan."""
    given = repeated(context, "input_shape", "batch", "weights", "seed", *HYPERPARAMETERS)
    words = ["edgetailor", "export", model, *given, "--submodel", submodel, "--out", "bundle"]
    return shlex.join(words)
