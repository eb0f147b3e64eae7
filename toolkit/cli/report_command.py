"""`edgetailor report`: draw profiles or evaluations, or compare two profiles."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from device_agent.cli.console import print_json
from device_agent.cli.options import Size

if TYPE_CHECKING:
    from toolkit.report.evaluation_document import EvaluationDocument

FILE = click.Path(path_type=Path)
MOST_EVALUATIONS = 4
"""The most evaluations in one picture."""


class Share(click.ParamType[float]):
    """A percentage like 5%, as a fraction: 0.05."""

    name = "percent"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read a percentage."""
        if isinstance(value, float):
            return value
        try:
            share = float(str(value).removesuffix("%")) / 100
        except ValueError:
            share = -1.0
        if not (str(value).endswith("%") and 0 <= share < 10):
            self.fail(f"Invalid percentage {value!r}: write for example 5%.", param, ctx)
        return share


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command("diff")
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
@click.option(
    "--max-regression",
    "allowed",
    type=Share(),
    default="5%",
    show_default=True,
    help="Allowed growth of a phase's time or peak memory.",
)
@click.option("--other-machine", is_flag=True, help="Allow profiles of two different machines.")
@json_option
def diff(before: Path, after: Path, allowed: float, other_machine: bool, as_json: bool) -> None:
    """Show what became slower or larger from the profile BEFORE to AFTER.

    BEFORE and AFTER may be folders with several profiles of the bundle; the spread between
    processes is then included. The exit code is 8 if the time or the peak memory of a phase grew by
    more than --max-regression. A longer time counts only if the median of each profile is
    outside the range p10 to p90 of the other. The exit code is 7 if such a time is unstable:
    measure again.
    """
    from profiles.documents.profile_merging import read_merged
    from toolkit.report import profile_diff as comparing

    comparison = comparing.compare(read_merged(before), read_merged(after), allowed, other_machine)
    if as_json:
        print_json(json.dumps(comparing.as_json(comparison), indent=1))
    else:
        click.echo("\n".join(comparing.lines(comparison)))
    comparing.require_no_regression(comparison)


class WithDiff(click.Command):
    """A command that takes files. If its first argument is the word `diff`, it runs `diff`."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """See click."""
        if args[:1] == ["diff"]:
            return diff.make_context(f"{info_name} diff", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=WithDiff)
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="FILE...")
@click.option("--out", type=FILE, help="HTML file to write; it can be read offline.")
@click.option("--png", type=FILE, help="PNG file to write.")
@click.option(
    "--budget", type=Size(), help="Memory budget of a process, like 256MB, drawn as a line."
)
@click.option("--force", is_flag=True, help="Replace existing files.")
@json_option
def report(
    files: tuple[Path, ...],
    out: Path | None,
    png: Path | None,
    budget: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Draw profiles of bundles, or evaluations of models.

    Profiles give the memory and the time of each phase. All figures are for one batch. All profiles
    must be of one machine and one model. Several profiles of one submodel are merged into one bar.
    `edgetailor report diff BEFORE AFTER` compares two profiles of one submodel.

    Evaluations give the accuracy of each class, the confusion matrix, and the figures on the
    devices that judge the model. Several models are drawn side by side.

    \b
        edgetailor-agent profile bundles/full --out full.json
        edgetailor report full.json slice.json --budget 256MB --out report.html
        edgetailor evaluate federation.toml --json > evaluation.json
        edgetailor report evaluation.json --out quality.html
    """
    from device_agent.formats.atomic_files import check_file_place
    from profiles.documents.bundle_profile_reading import read_profile
    from toolkit.report.evaluation_document import read_evaluation

    for path in (out, png):
        if path is not None:
            check_file_place(path, force)
    evaluations = [document for path in files if (document := read_evaluation(path)) is not None]
    if evaluations:
        if len(evaluations) < len(files) or budget is not None or as_json:
            raise click.UsageError(
                "Evaluations cannot be combined with profiles, --budget or --json."
            )
        _report_evaluations(evaluations, out, png)
        return
    read = [read_profile(path) for path in files]

    from toolkit.report import phase_costs, report_output

    costs = phase_costs.make_report(read, budget)
    report_output.write(costs, out, png)
    if as_json:
        click.echo(json.dumps(phase_costs.as_json(costs), indent=1))
    else:
        report_output.show(costs, [path for path in (out, png) if path is not None])


def _report_evaluations(
    evaluations: Sequence["EvaluationDocument"], out: Path | None, png: Path | None
) -> None:
    """Print evaluations, and write their page and picture."""
    from device_agent.formats.atomic_files import write_file
    from profiles.errors import InputError
    from toolkit.cli.printed.evaluation_table import show_evaluations
    from toolkit.report.evaluation_document import check_comparable

    if len(evaluations) > MOST_EVALUATIONS:
        raise click.UsageError(f"Give at most {MOST_EVALUATIONS} evaluations.")
    check_comparable(evaluations)
    with_classes = [document for document in evaluations if document.classes]
    if png is not None and not with_classes:
        raise InputError(
            "The evaluations have no classes, so there is nothing to draw. Leave out --png.",
            code="evaluation.no-classes",
        )
    if out is not None or png is not None:
        from toolkit.report.evaluation_charts import draw_png
        from toolkit.report.evaluation_page import evaluation_page

        if out is not None:
            write_file(out, evaluation_page(evaluations).encode())
        if png is not None:
            write_file(png, draw_png(with_classes))
    show_evaluations(evaluations)
