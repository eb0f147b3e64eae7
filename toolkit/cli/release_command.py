"""`edgetailor release`: offer the model of a round to the devices of a federation."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from profiles.text_formatting import counted
from toolkit.cli.deploy_command import BEST, Round
from toolkit.cli.early_checks import check_data, check_model
from toolkit.cli.options import JSON_HELP, PATH, argument, option, takes
from toolkit.deployment.card_fields import Precision
from toolkit.terminal_output import show_stages

if TYPE_CHECKING:
    from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
    from toolkit.coordinator.storage.release_folder import Release

logger = logging.getLogger(__name__)
RELEASES_VERSION = 1


class Share(click.ParamType[float]):
    """A share of devices, like 10%."""

    name = "share"

    def convert(
        self, value: str | float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read a percentage above 0 and below 100."""
        try:
            share = float(str(value).removesuffix("%")) / 100
        except ValueError:
            share = 0.0
        if not str(value).endswith("%") or not 0 < share < 1:
            self.fail(f"Invalid share {value!r}: write a percentage, for example 10%.", param, ctx)
        return share


@dataclass(frozen=True, kw_only=True)
class ReleaseOptions:
    """The options of `release`."""

    federation: Path = argument(type=PATH)
    round: int | str | None = argument(type=Round(), required=False)
    kinds: tuple[str, ...] = option(
        "Kind of devices that get the release; repeatable.  [default: all]", "--to"
    )
    share: float | None = option(
        "Share of the devices of each kind that get the release first, for example 10%.",
        type=Share(),
    )
    then_all: bool = option(
        "Offer the release to all devices once every device of the share has taken it."
    )
    precision: Precision = option(
        "float32; float16 weights; or int8, which is calibrated on samples.", default="float32"
    )
    calibrate: str | None = option(
        "Samples for int8.  [default: statistics or held_out of the federation]"
    )
    fine_tune: int | None = option(
        "Devices also train the release for STEPS on their own samples, and keep the better model.",
        type=click.IntRange(1),
        metavar="STEPS",
    )
    to_all: bool = option("Offer the newest release to all devices.", "--all")
    back: bool = option("Withdraw the newest release: devices return to the previous one.")
    as_json: bool = option(JSON_HELP, "--json")


@click.command()
@takes(ReleaseOptions)
def release(options: ReleaseOptions) -> None:
    """Offer the model of ROUND to devices.

    FEDERATION is the federation's file or its state folder; `edgetailor serve` may run on it. ROUND
    is the number of a round, or best. Without ROUND, the command shows the releases and what each
    device runs.

    A device fetches the release when it has nothing to train, and tries it on its own samples. If
    the release is worse, the device keeps its present model. Otherwise it predicts with the
    release.

    \b
        edgetailor release federation.toml best --share 10%
        edgetailor release federation.toml
        edgetailor release federation.toml --all
        edgetailor release federation.toml --back
    """
    from toolkit.coordinator.federation_source import load_federation
    from toolkit.coordinator.releases.release_changes import release_to_all, withdraw_newest

    new = {"--to": options.kinds, "--share": options.share, "--then-all": options.then_all}
    new["--fine-tune"] = options.fine_tune
    given = [name for name, value in new.items() if value]
    actions = [options.round is not None, options.to_all, options.back]
    if sum(actions) > 1:
        raise click.UsageError("Give only one of ROUND, --all and --back.")
    if given and options.round is None:
        raise click.UsageError(f"{given[0]} needs a ROUND.")
    if options.then_all and options.share is None:
        raise click.UsageError("--then-all needs a --share.")
    if options.calibrate is not None:
        if options.precision != "int8":
            raise click.UsageError("--calibrate needs --precision int8.")
        check_data(options.calibrate)
    config = load_federation(options.federation)
    if options.to_all:
        said = _told(release_to_all(config.state))
    elif options.back:
        said = _withdrawn(config.state, withdraw_newest(config.state))
    elif options.round is not None:
        made = _new(config, options)
        said = " ".join([_told(made), *about_share(config.state, made)])
    else:
        said = ""
    if said:
        click.echo(said, err=True)
    if options.as_json or not said:
        _show(config, options.as_json)


def _new(config: "CoordinatorConfig", options: ReleaseOptions) -> "Release":
    from toolkit.coordinator.releases.release_changes import check_new
    from toolkit.coordinator.storage.saved_rounds import best_round, model_file
    from toolkit.deployment.targets import kind_targets

    # What can fail is checked before PyTorch is loaded.
    kinds = [target.kind or "" for target in kind_targets(config, options.kinds, Path())]
    check_model(config.model)
    round_ = best_round(config.state) if options.round == BEST else int(options.round or 0)
    model_file(config.state, round_)
    check_new(config.state, kinds, options.share)
    show_stages()
    logger.info("loading PyTorch")

    from toolkit.deployment.release import make_release

    return make_release(
        config,
        round_,
        options.kinds,
        share=options.share,
        then_all=options.then_all,
        precision=options.precision,
        calibration=options.calibrate,
        fine_tune=options.fine_tune or 0,
    )


def _withdrawn(state: Path, release: "Release") -> str:
    """Say that `release` is withdrawn, and to which release its devices return."""
    from toolkit.coordinator.storage.release_folder import ReleaseFolder, offered_to

    releases = ReleaseFolder(state).read()
    kinds: dict[int, list[str]] = {}
    for kind in release.kinds:
        kinds.setdefault(offered_to(releases, "", kind), []).append(kind)
    returns = "; ".join(
        (f"of kind {', '.join(of)} " if len(kinds) > 1 else "")
        + f"return to {f'release {before}' if before else 'the newest model of a round'}"
        for before, of in kinds.items()
    )
    none = " No earlier release is kept." if 0 in kinds else ""
    return f"Release {release.number} is withdrawn: devices {returns}.{none}"


def about_share(state: Path, release: "Release") -> Iterator[str]:
    """Name the kinds with no device, and those with every device, in the share of `release`."""
    from toolkit.coordinator.releases.release_changes import members

    for kind, devices in members(state, release.kinds).items():
        if release.devices is None:
            continue
        if not devices:
            yield f"No device of kind {kind} is a member, so none is in the share."
        elif set(devices) <= set(release.devices):
            yield f"All devices of kind {kind} ({len(devices)}) are in the share."


def _told(release: "Release") -> str:
    whose = (
        "all devices"
        if release.devices is None
        else f"{counted(len(release.devices), 'device')}: {', '.join(release.devices[:5])}"
        f"{', ...' if len(release.devices) > 5 else ''}"
    )
    kinds = ", ".join(release.kinds)
    tuned = (
        f" They fine-tune it for {counted(release.fine_tune, 'step')} if their owners agree."
        if release.training
        else ""
    )
    return (
        f"Release {release.number}, the model after round {release.round}, is offered to {whose} "
        f"(kinds: {kinds}).{tuned}"
    )


def _show(config: "CoordinatorConfig", as_json: bool) -> None:
    import msgspec

    from toolkit.coordinator.releases.release_status import release_status

    releases, devices = release_status(config.state)
    if as_json:
        document = {
            "version": RELEASES_VERSION,
            "releases": [msgspec.to_builtins(release) for release in releases],
            "devices": [
                {**msgspec.to_builtins(device), "runs": device.runs, "answer": device.answer}
                for device in devices
            ],
        }
        click.echo(json.dumps(document, indent=1))
        return
    from toolkit.cli.printed.release_table import show_releases

    if not releases:
        click.echo("There is no release. Make one: edgetailor release FEDERATION ROUND.")
        return
    show_releases(releases, devices)
