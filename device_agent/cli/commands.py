"""The commands of `edgetailor-agent`. A command is imported only when it is used.

On a small board, importing all modules would take longer than running a command.
"""

from collections import UserDict
from collections.abc import Iterable, Iterator
from importlib import import_module

import click

from device_agent import __version__
from device_agent.cli.console import EXIT_CODES

COMMANDS = (
    "bench",
    "calibrate",
    "doctor",
    "install-service",
    "join",
    "leave",
    "predict",
    "profile",
    "run",
    "status",
    "train",
    "uninstall-service",
)


class Commands(UserDict[str, click.Command]):
    """Imports a command when its name is looked up.

    The command `a-b` is the function `a_b` of the module `a_b_command`.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._names = tuple(names)

    def __getitem__(self, name: str) -> click.Command:
        if name in self._names and name not in self.data:
            function = name.replace("-", "_")
            module = import_module(f"device_agent.cli.{function}_command")
            self.data[name] = getattr(module, function)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@click.group(
    commands=Commands(COMMANDS), epilog=EXIT_CODES, context_settings={"max_content_width": 100}
)
@click.version_option(__version__)
def main_group() -> None:
    """Train and profile bundles on this device, alone or in a federation.

    Alone: copy a bundle folder here, train it, and copy the update back. In a federation: join
    once, then run.
    """
    from device_agent.training.memory_limits import check_memory

    # A limit that is too low would end the process in an import, without an explanation.
    check_memory()
