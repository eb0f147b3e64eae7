"""What both commands share: exit codes, and errors as one sentence instead of a traceback."""

import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

import click

from device_agent.log_format import PlainFormatter, show_logs
from profiles.errors import EdgeTailorError, InputError, LimitError

EXIT_CODES = """\b
Exit codes:
  0    done
  2    usage or bad input
  3    export failed
  4    verification failed
  5    nothing fits
  6    connection or authorisation
  7    measurement unstable
  8    slower or larger than allowed
  70   a fault of the program's own
  130  interrupted
"""
FAULT = 70
INTERRUPTED = 130
EXTRAS = {"ai_edge_litert": "tflite", "flatbuffers": "tflite", "sympy": "tflite"}
"""Which of this project's extras brings a package; `toolkit` brings the others."""


def say(message: str) -> None:
    """Talk to the person: on stderr, so that stdout holds data only."""
    click.echo(message, err=True)


def run(command: click.Command, name: str) -> NoReturn:
    """Run `command` and exit with its code; no error shows a traceback."""
    try:
        with show_logs(say, PlainFormatter()):
            code = command.main(prog_name=name, standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except SystemExit:
        # A server's orderly end, or click's where the reader of stdout has gone: no error.
        code = 0
    except click.ClickException as error:
        error.show()
        code = error.exit_code if error.exit_code != 1 else 2
    except EdgeTailorError as error:
        say(f"Error: {error}")
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        say("Interrupted.")
        code = INTERRUPTED
    except Exception as error:
        code = unexpected(error, name)
    sys.exit(code if isinstance(code, int) else 0)


def unexpected(error: Exception, name: str) -> int:
    """Say what `error` of a library is about; returns the exit code."""
    from device_agent.system.process_memory import ran_out

    if (short := ran_out(error)) is not None:
        say(
            f"Error: Memory ran out: {str(short) or 'none is left'}. Allow this process more "
            "(ulimit, --max-memory, MemoryMax), or end what else runs."
        )
        return LimitError.exit_code
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        say(
            f"Error: This needs the Python package {package}, which is not installed here. In the "
            f"folder of EdgeTailor's source, `pip install '.[{EXTRAS.get(package, 'toolkit')}]'` "
            "installs it with all else that a server needs."
        )
        return InputError.exit_code
    if isinstance(error, OSError):
        say(f"Error: {error.filename or 'a file'}: {error.strerror or error}.")
        return InputError.exit_code
    try:
        details = str(write_traceback(name))
    except OSError as trouble:
        said = f"{type(error).__name__}: {error}"
        details = f"{said} (its log cannot be written: {trouble.strerror})"
    say(f"Error: {name} failed; this is a fault of its own. Details: {details}")
    return FAULT


def write_traceback(name: str) -> Path:
    """Put the present exception's traceback into a file of its own."""
    handle, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log")
    with open(handle, "w", encoding="utf-8") as file:
        traceback.print_exc(file=file)
    return Path(path)
