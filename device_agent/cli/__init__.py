"""`edgetailor-agent`: the device's command line. It parses, calls the library and prints.

Each subcommand has a file. The command `edgetailor` also uses `console.py`.
"""

import os
import sys

from device_agent import __version__

NAME = "edgetailor-agent"


def main() -> None:
    """Entry point of `edgetailor-agent`."""
    # The agent multiplies no matrices with numpy, and OpenBLAS reserves 40 MB for each thread.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if sys.argv[1:] == ["--version"]:
        _show_version()
        return
    from device_agent.cli.commands import main_group
    from device_agent.cli.console import run
    from device_agent.log_format import quieten_others

    quieten_others()
    run(main_group, NAME)


def _show_version() -> None:
    """Print the version as click would. Importing click takes seconds on a small board."""
    print(f"{NAME}, version {__version__}")
