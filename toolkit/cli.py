"""`edgetailor`: the server side's command line. It parses, calls the library and prints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import click

from device_agent.console import EXIT_CODES, run
from profiles.errors import SpecError
from toolkit.policy import AggregationPolicy, Factors, Weights
from toolkit.training import Loss, Optimizer, TrainingConfig

Decorated = Callable[..., Any]
SEED = click.IntRange(0, 2**31 - 1)


class Shape(click.ParamType[tuple[int, ...]]):
    """A sample's shape, like 3,32,32."""

    name = "shape"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Read a shape of positive whole numbers."""
        try:
            shape = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            shape = ()
        if not shape or min(shape) < 1:
            self.fail(f"{value!r} is no shape: write a sample's sizes like 3,32,32.", param, ctx)
        return shape


def model_options(command: Decorated) -> Decorated:
    """MODEL and how to build it."""
    for option in (
        click.option(
            "--seed",
            default=0,
            show_default=True,
            type=SEED,
            help="Seed of the first weights.",
        ),
        click.option("--weights", type=click.Path(path_type=Path), help="Weights (.safetensors)."),
        click.option(
            "--batch",
            default=TrainingConfig.batch_size,
            show_default=True,
            type=click.IntRange(2),
            help="Batch size.",
        ),
        click.option(
            "--input-shape", type=Shape(), required=True, help="One sample's shape, like 3,32,32."
        ),
        click.argument("model"),
    ):
        command = option(command)
    return command


loss_option = click.option(
    "--loss",
    type=click.Choice(get_args(Loss)),
    default=TrainingConfig.loss,
    show_default=True,
    help="What is minimised; mse is for regressions.",
)


@click.group(epilog=EXIT_CODES, context_settings={"max_content_width": 100})
@click.version_option(package_name="edgetailor")
def main_group() -> None:
    """Cut one PyTorch model to fit every device, and fold what they train back into it.

    MODEL is a reference like toolkit.models:resnet20: a function of yours without arguments that
    returns an nn.Module. The current folder is importable.

    A submodel is a family and its size; options follow after commas:

    \b
    full                      the whole model
    low-rank:0.25             rank ratio; keep=, decay=
    slice:0.42                largest capacity; skip=
    slice:blocks.3            first trained module; skip=
    slice:0.42+low-rank:0.25  a slice of low-rank layers
    cp:2.0                    compression rate; penalty=, personal-steps=,
                              factor-steps=, factor-rate=
    width:0.5                 channel ratio
    pfedme                    the whole model and a personal one; penalty=,
                              personal-steps=, local-rate=
    """


@main_group.command()
@model_options
@click.option("--submodel", "specs", multiple=True, default=["full"], help="SPEC; repeatable.")
@click.option(
    "--cut-points", is_flag=True, help="Also list every place where `slice` can cut the model."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(
    model: str,
    input_shape: tuple[int, ...],
    batch: int,
    weights: Path | None,
    seed: int,
    specs: tuple[str, ...],
    cut_points: bool,
    as_json: bool,
) -> None:
    """Show parameters, activations, MACs, capacity and bytes of submodels.

    Capacity is EmbracingFL's: trained parameters plus activations of one batch, over the full
    model's.

    \b
    edgetailor inspect toolkit.models:resnet20 --input-shape 3,32,32 \\
        --submodel full --submodel slice:blocks.3
    """
    from toolkit import inspection, tables
    from toolkit.loading import load_model

    loaded = load_model(model, weights, seed)
    found = inspection.inspect_each(loaded, input_shape, specs, batch)
    failed = [f for f in found if isinstance(f, inspection.NotPossible)]
    if len(specs) == len(failed) == 1 and not cut_points:
        raise SpecError(failed[0].error)
    places = inspection.cut_places(loaded, input_shape, batch) if cut_points else None
    if as_json:
        click.echo(json.dumps(inspection.as_json(found, places), indent=1))
    else:
        tables.show_inspections(found, batch)
        if places is not None:
            tables.show_cut_places(places)
    if failed:
        click.get_current_context().exit(SpecError.exit_code)


def list_operators(context: click.Context, option: click.Parameter, asked: bool) -> None:
    """Print the coverage table and end."""
    if not asked:
        return
    from exporters.coverage import document

    click.echo(document())
    context.exit()


@main_group.command()
@model_options
@click.option(
    "--list-operators",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=list_operators,
    help="Print which operators a model may have, and exit.",
)
@click.option(
    "--submodel", "specs", multiple=True, help="SPEC to export; repeatable.  [default: full]"
)
@click.option(
    "--tiers",
    "tiers_file",
    type=click.Path(path_type=Path),
    help="TOML file of [[tiers]], each with a name and a submodel.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["onnx", "tflite"]),
    default="onnx",
    show_default=True,
    help="Graphs for onnxruntime, or one file for LiteRT.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="New bundle folder; of several bundles the folder around them.",
)
@click.option(
    "--epochs",
    default=TrainingConfig.epochs,
    show_default=True,
    help="Local passes over the data, at least 1.",
)
@click.option(
    "--learning-rate",
    default=TrainingConfig.learning_rate,
    show_default=True,
    help="Learning rate, from 0 up.",
)
@loss_option
@click.option(
    "--optimizer",
    type=click.Choice(get_args(Optimizer)),
    default=TrainingConfig.optimizer,
    show_default=True,
    help="What takes the steps.",
)
@click.option(
    "--momentum",
    default=TrainingConfig.momentum,
    show_default=True,
    help="Momentum of sgd and nesterov, from 0 to below 1.",
)
@click.option(
    "--weight-decay",
    default=TrainingConfig.weight_decay,
    show_default=True,
    help="Added to the gradient; with adamw taken off the parameters.",
)
@click.option(
    "--proximal",
    default=TrainingConfig.proximal,
    show_default=True,
    help="FedProx's mu, which holds a device near the weights it got.",
)
@click.option(
    "--save-weights",
    type=click.Path(path_type=Path),
    help="Also write the global model that the bundle is cut from; `aggregate` starts from it.",
)
@click.option("--no-verify", is_flag=True, help="Skip the comparison with PyTorch.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.option("--dry-run", is_flag=True, help="Split and trace nothing to disk; show the sizes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export(
    model: str,
    input_shape: tuple[int, ...],
    batch: int,
    weights: Path | None,
    seed: int,
    specs: tuple[str, ...],
    tiers_file: Path | None,
    format_: Literal["onnx", "tflite"],
    out: Path,
    epochs: int,
    learning_rate: float,
    loss: Loss,
    optimizer: Optimizer,
    momentum: float,
    weight_decay: float,
    proximal: float,
    save_weights: Path | None,
    no_verify: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Export a submodel with its training step as a bundle for `edgetailor-agent train`.

    The bundle is checked against PyTorch on fresh random inputs; a miss exits 4. Several submodels,
    or the tiers of a file, become a folder each under --out; one that fails does not stop the
    others, and the exit code is the worst.

    \b
    edgetailor export toolkit.models:resnet20 --input-shape 3,32,32 \\
        --submodel low-rank:0.25 --out bundles/phone \\
        --save-weights global.safetensors
    """
    from toolkit import exporting, tables, tiers

    if specs and tiers_file is not None:
        raise click.UsageError("Give --submodel or --tiers, not both.")
    request = exporting.Request(
        model=model,
        sample_shape=input_shape,
        spec=specs[0] if specs else "full",
        out=out,
        weights=weights,
        seed=seed,
        format=format_,
        training=TrainingConfig(
            batch,
            epochs,
            learning_rate,
            momentum,
            weight_decay,
            loss=loss,
            optimizer=optimizer,
            proximal=proximal,
        ),
        save_weights=save_weights,
        verify=not no_verify,
        force=force,
        dry_run=dry_run,
    )
    if tiers_file is None and len(specs) < 2:
        result = exporting.export_bundle(request, report=tables.Stages())
        if as_json:
            click.echo(json.dumps(exporting.as_json(result), indent=1))
        else:
            tables.show_export(result, batch)
        return
    wanted = tiers.read_tiers(tiers_file) if tiers_file is not None else tiers.tiers_of(specs)
    results = tiers.export_tiers(request, wanted, report=tables.Stages())
    if as_json:
        click.echo(json.dumps(tiers.tiers_as_json(results), indent=1))
    else:
        tables.show_tiers(results)
    raise click.exceptions.Exit(tiers.exit_code(results))


@main_group.command()
@click.argument("global_file", metavar="GLOBAL", type=click.Path(path_type=Path))
@click.argument("updates", metavar="UPDATE...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="New weights file.")
@click.option(
    "--weights",
    type=click.Choice(get_args(Weights)),
    default=AggregationPolicy.weights,
    show_default=True,
    help="What an update counts; softmax is FedHM's, over the submodels' strengths.",
)
@click.option(
    "--temperature",
    default=AggregationPolicy.temperature,
    show_default=True,
    help="Of the softmax, from 0.05 up; inf makes all equal.",
)
@click.option(
    "--factors",
    type=click.Choice(get_args(Factors)),
    default=AggregationPolicy.factors,
    show_default=True,
    help="For cp: average the factors, or the tensors that they compose.",
)
@click.option(
    "--beta",
    default=AggregationPolicy.beta,
    show_default=True,
    help="How far to go from the old model to the mean, up to 10; beyond the mean above 1.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def aggregate(
    global_file: Path,
    updates: tuple[Path, ...],
    out: Path,
    weights: Weights,
    temperature: float,
    factors: Factors,
    beta: float,
    force: bool,
    as_json: bool,
) -> None:
    """Fold UPDATE folders into the weights GLOBAL (.safetensors).

    Updates of any families mix. Each number becomes the mean over the devices that trained it, by
    their numbers of samples or as --weights says.
    """
    from toolkit import offline, tables

    if not updates:
        raise click.UsageError(
            "Give at least one UPDATE folder, as `edgetailor-agent train` wrote."
        )
    policy = AggregationPolicy(weights, temperature, factors, beta)
    done = offline.aggregate_files(global_file, updates, out, force, policy)
    if as_json:
        click.echo(json.dumps(offline.as_json(done), indent=1))
    else:
        tables.show_aggregated(done)


@main_group.command()
@click.argument("model")
@click.option(
    "--weights", required=True, type=click.Path(path_type=Path), help="Weights (.safetensors)."
)
@click.option(
    "--input-shape", type=Shape(), required=True, help="One sample's shape, like 3,32,32."
)
@click.option("--data", required=True, help="FILE.npz with x and y, or module:callable.")
@loss_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(
    model: str, weights: Path, input_shape: tuple[int, ...], data: str, loss: Loss, as_json: bool
) -> None:
    """Judge MODEL with the weights of a file: accuracy and loss on data that none trained on.

    \b
    edgetailor evaluate toolkit.models:resnet20 --weights next.safetensors \\
        --input-shape 3,32,32 --data held_out.npz
    """
    from toolkit import evaluation, tables

    found = evaluation.evaluate_file(model, weights, input_shape, data, loss)
    if as_json:
        click.echo(json.dumps(evaluation.as_json(found), indent=1))
    else:
        tables.show_evaluation(found)


@main_group.command()
@click.argument("config", type=click.Path(path_type=Path))
def serve(config: Path) -> None:
    """Coordinate rounds over HTTP as CONFIG (TOML) says, until interrupted.

    Writes one join token for each kind of device under the state folder; hand it to the device:
    edgetailor-agent join URL --token-file FILE. The interface is described at URL/docs.
    """
    from toolkit.coordinator.server import serve as serve_config

    serve_config(config)


@main_group.command()
@click.option(
    "--out",
    default="edgetailor-demo",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder for everything the demo makes.",
)
@click.option("--rounds", default=12, show_default=True, type=click.IntRange(1), help="Rounds.")
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=SEED,
    help="Seed of data split and training.",
)
@click.option("--all-full", is_flag=True, help="Give every device the full model, to compare.")
@click.option("--force", is_flag=True, help="Replace the folder of an earlier demo.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def demo(out: Path, rounds: int, seed: int, all_full: bool, force: bool, as_json: bool) -> None:
    """Run the main job on this machine: one coordinator, eight devices of four kinds.

    The data are the 1,797 handwritten digits of scikit-learn, split unevenly over the devices.
    """
    from toolkit.demo import run_demo
    from toolkit.demo.report import as_json as report_json
    from toolkit.demo.report import show

    result = run_demo(out, rounds=rounds, seed=seed, all_full=all_full, force=force)
    if as_json:
        click.echo(json.dumps(report_json(result), indent=1))
    else:
        show(result)


def main() -> None:
    """Entry point of `edgetailor`."""
    run(main_group, "edgetailor")


if __name__ == "__main__":
    main()
