"""Options and parameter types that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profiles.errors import InputError
from profiles.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from device_agent.federation.owner_limits import QuietHours


class Duration(click.ParamType[float]):
    """A duration such as 90s, 10m or 1h, in seconds."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Convert the text."""
        try:
            return value if isinstance(value, float) else parse_duration(value)
        except InputError as error:
            self.fail(str(error), param, ctx)


threads_option = click.option(
    "--threads",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Threads of the runtime. 0 means one for each core.",
)
data_option = click.option(
    "--data",
    required=True,
    help="Local data: FILE.npz with x and y (x_NAME and y_NAME for several inputs or outputs), a "
    "folder of such .npy files, or module:callable; also pictures or CSV files, if the federation "
    "takes them.",
)
validation_option = click.option(
    "--validation",
    default=0.0,
    type=click.FloatRange(0, 1, max_open=True),
    help="Share of the data to hold out and evaluate after each epoch, such as 0.1.",
)


class Size(click.ParamType[int]):
    """A size such as 256MB, in bytes."""

    name = "size"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Convert the text."""
        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except InputError as error:
            self.fail(str(error), param, ctx)


max_memory_option = click.option(
    "--max-memory",
    type=Size(),
    help="Memory that this process may use, such as 256MB. Work that needs more is refused.",
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
    help="Seed for the order of the samples and for dropout.",
)
user_option = click.option(
    "--user", is_flag=True, help="Use a service of the current user. This does not need root."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


class Hours(click.ParamType["QuietHours"]):
    """A daily time span, such as 22:00-07:00."""

    name = "from-to"

    def convert(
        self, value: "str | QuietHours", param: click.Parameter | None, ctx: click.Context | None
    ) -> "QuietHours":
        """Convert the text."""
        from device_agent.federation.owner_limits import QuietHours

        try:
            return value if isinstance(value, QuietHours) else QuietHours.parse(value)
        except InputError as error:
            self.fail(str(error), param, ctx)


OWNER_OPTIONS = (
    click.option(
        "--max-temperature",
        type=float,
        metavar="CELSIUS",
        help="Pause above this temperature until the device is 5 degrees cooler.",
    ),
    click.option(
        "--only-when-charging", is_flag=True, help="Pause while the device runs on battery."
    ),
    click.option("--only-when-idle", is_flag=True, help="Pause while somebody uses this machine."),
    click.option(
        "--only-unmetered", is_flag=True, help="Pause while the network connection is metered."
    ),
    click.option("--quiet-hours", type=Hours(), help="Pause at this time every day: 22:00-07:00."),
    click.option(
        "--report-classes",
        is_flag=True,
        help="If the devices judge the model and the operator asks for it, also report how well "
        "the model recognises each class of this device's samples.",
    ),
    click.option(
        "--fine-tune",
        is_flag=True,
        help="If the operator asks for it, fine-tune each release on the samples of this device, "
        "and predict with the better model. The fine-tuned model stays on the device.",
    ),
    click.option(
        "--nice",
        default=0,
        type=click.IntRange(0, 19),
        help="Niceness of the process: 19 uses only processor time that no other program wants.",
    ),
    click.option("--log-json", is_flag=True, help="Write the log as one JSON object per line."),
)


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `RunOptions` to `command`."""
    training = (threads_option, seed_option, validation_option, max_memory_option)
    # Decorators apply from the last to the first: reversed, --help lists them in this order.
    for option in reversed((data_option, state_option, *training, *OWNER_OPTIONS)):
        command = option(command)
    return command
