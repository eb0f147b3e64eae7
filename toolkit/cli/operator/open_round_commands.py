"""Commands of the operator about the rounds of a running federation, and about its model."""

import click

from toolkit.cli.operator.operator_options import (
    client_of,
    federation_option,
    json_option,
    reason_option,
    say_done,
)


@click.command()
@reason_option
@federation_option
@json_option
def close_round(reason: str, federation: str | None, as_json: bool) -> None:
    """Close the open round with the updates so far.

    The command is refused if fewer updates have come than `min_updates` and `quorum` require.
    """
    client = client_of(federation)
    round_ = client.status().round
    client.close_round(round_, reason)
    say_done(f"Round {round_} closes with the updates that have come.", as_json, round=round_)


@click.command()
@click.argument("seconds", type=click.IntRange(0, 30 * 86400))
@reason_option
@federation_option
@json_option
def extend_round(seconds: int, reason: str, federation: str | None, as_json: bool) -> None:
    """Let the open round end SECONDS from now.

    The round ends earlier if all updates have come. Later rounds have the deadline of the
    federation's file again.
    """
    client = client_of(federation)
    round_ = client.status().round
    client.end_round_after(round_, seconds, reason)
    sentence = f"Round {round_} ends in {seconds} s at the latest."
    say_done(sentence, as_json, round=round_, seconds=seconds)


@click.command()
@reason_option
@federation_option
@json_option
def abort_round(reason: str, federation: str | None, as_json: bool) -> None:
    """Drop the updates of the open round; it opens again.

    A device that still has its update sends this update again.
    """
    client = client_of(federation)
    round_ = client.status().round
    client.abort_round(round_, reason)
    say_done(f"Round {round_} opens again, without its updates.", as_json, round=round_)


@click.command()
@click.argument("name")
@reason_option
@federation_option
@json_option
def drop_update(name: str, reason: str, federation: str | None, as_json: bool) -> None:
    """Take a device's update out of the open round.

    The round goes on without the device NAME. To keep it out of later rounds, pause it.
    """
    client = client_of(federation)
    round_ = client.status().round
    client.drop_update(round_, name, reason)
    sentence = f"Round {round_} goes on without the update of {name}."
    say_done(sentence, as_json, round=round_, device=name)


@click.command()
@reason_option
@federation_option
@json_option
def pause_rounds(reason: str, federation: str | None, as_json: bool) -> None:
    """Let no round open until `resume-rounds`.

    The open round ends as usual. Waiting devices are told the reason.
    """
    client_of(federation).pause_rounds(reason)
    say_done("No round opens until `edgetailor resume-rounds`.", as_json, paused=True)


@click.command()
@reason_option
@federation_option
@json_option
def resume_rounds(reason: str, federation: str | None, as_json: bool) -> None:
    """Let rounds open again."""
    client_of(federation).resume_rounds(reason)
    say_done("Rounds open again.", as_json, paused=False)


@click.command()
@click.argument("round_", metavar="[ROUND]", type=click.IntRange(min=0), required=False)
@reason_option
@federation_option
@json_option
def go_back(round_: int | None, reason: str, federation: str | None, as_json: bool) -> None:
    """Let the next round start from an earlier model.

    The next round starts from the model after ROUND. Without ROUND, the last round is repeated: the
    next round starts from the model with which the last round began. Updates of the open round are
    dropped. If `edgetailor serve` does not run, use `rollback`.
    """
    target = client_of(federation).go_back(round_, reason).round
    say_done(f"The next round starts from the model of round {target}.", as_json, round=target)


COMMANDS: tuple[click.Command, ...] = (
    *(close_round, extend_round, abort_round, drop_update),
    *(pause_rounds, resume_rounds, go_back),
)
