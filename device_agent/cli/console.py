"""Output, exit codes and error reports of the commands `edgetailor-agent` and `edgetailor`.

This module is imported before the arguments are parsed, so it imports little.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from device_agent.cli.missing_packages import missing_package
from device_agent.log_format import JsonFormatter, PlainFormatter, Write, fields, show_logs
from profiles.errors import EdgeTailorError, InputError, LimitError
from profiles.project_urls import issues_url

log = logging.getLogger(__name__)
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
  70   internal error
  130  interrupted
"""
JSON_OPTION = "--json"
ERROR_VERSION = 1

_output = {"json_printed": False}


class InternalError(EdgeTailorError):
    """A fault of the program itself."""

    exit_code = 70


class InterruptedByUserError(EdgeTailorError):
    """The user pressed Ctrl-C."""

    exit_code = 130


def say(message: str) -> None:
    """Print a message for people on stderr. stdout is for results only."""
    click.echo(message, err=True)


def print_json(document: str | bytes) -> None:
    """Print the JSON document of a command that was called with --json.

    If an error follows, for example with `--strict`, only stderr and the exit code report it. So
    stdout never has a second JSON document.
    """
    text = document.decode() if isinstance(document, bytes) else document
    click.echo(text, nl=not text.endswith("\n"))
    _output["json_printed"] = True


def run(command: click.Command, name: str) -> NoReturn:
    """Run `command` and exit with its code.

    Errors are printed as one sentence on stderr, never as a traceback. With --json they are also
    printed as one JSON object on stdout: {"version": 1, "error": {"code", "message", ...}}.

    Args:
        command: The click command; it reads `sys.argv`.
        name: Name of the program in help texts and log files.
    """
    _output["json_printed"] = False
    try:
        with show_logs(say, PlainFormatter()):
            code = command.main(prog_name=name, standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except SystemExit:
        # A server was told to stop, or click ends because the reader of stdout closed the pipe.
        code = 0
    except click.ClickException as error:
        error.show()
        code = _finish(_from_click(error))
    except EdgeTailorError as error:
        say(f"Error: {error}")
        code = _finish(error)
    except (KeyboardInterrupt, click.Abort):
        say("Interrupted.")
        code = _finish(InterruptedByUserError("Interrupted.", code="program.interrupted"))
    except Exception as error:
        known = _from_exception(error, name)
        say(f"Error: {known}")
        code = _finish(known)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def log_lines(
    as_json: bool, formatter: logging.Formatter | None = None, write: Write = say
) -> Iterator[None]:
    """Write the log as one JSON object per line while the block runs, if `as_json`.

    If `as_json` is set, an error of the block is also written to the log, because programs look for
    errors there. Otherwise `formatter` formats the log.
    """
    formatter = JsonFormatter() if as_json else formatter or PlainFormatter()
    with show_logs(write, formatter):
        try:
            yield
        except EdgeTailorError as error:
            if not as_json:
                raise
            log.error("%s", error, extra=fields(code=error.code))
            raise click.exceptions.Exit(error.exit_code) from None


def _finish(error: EdgeTailorError) -> int:
    """Print `error` as JSON if the command has the option --json. Returns the exit code."""
    import json

    # If the arguments cannot be parsed, click returns no options: look at the command line itself.
    if JSON_OPTION in sys.argv[1:] and not _output["json_printed"]:
        about = {"code": error.code, "message": str(error)} | error.values
        print_json(json.dumps({"version": ERROR_VERSION, "error": about}, indent=1))
    return error.exit_code


def _from_click(error: click.ClickException) -> EdgeTailorError:
    """Convert an error in the arguments to an error with a code."""
    message = error.format_message()
    parameter = getattr(error, "param", None)
    named = {} if parameter is None else {"option": parameter.opts[-1]}
    # Our parameter types catch an InputError and call `fail`: keep that error's code and values.
    if isinstance(cause := error.__context__, EdgeTailorError):
        values = cause.values | named | {"problem": message}
        return InputError("{problem}", code=cause.code, **values)
    if isinstance(error, click.NoSuchOption):
        return InputError(
            "{problem}",
            code="option.unknown",
            problem=message,
            option=error.option_name,
            possibilities=list(error.possibilities or ()),
        )
    if (command := getattr(error, "command_name", None)) is not None:
        possibilities = list(getattr(error, "possibilities", None) or ())
        return InputError(
            "{problem}",
            code="option.unknown-command",
            problem=message,
            command=command,
            possibilities=possibilities,
        )
    if isinstance(error, click.MissingParameter):
        return InputError("{problem}", code="option.missing", problem=message, **named)
    if isinstance(error, click.BadParameter):
        return InputError("{problem}", code="option.invalid-value", problem=message, **named)
    return InputError("{problem}", code="option.usage", problem=message)


def _from_exception(error: Exception, name: str) -> EdgeTailorError:
    """Convert an exception of Python or of a library to an error with a code."""
    from device_agent.system.process_memory import ran_out
    from device_agent.system.system_libraries import DEBIAN_PACKAGES, missing_library

    if (short := ran_out(error)) is not None:
        return LimitError(
            "Memory ran out: {reason}. Allow this process more memory (ulimit, --max-memory, "
            "MemoryMax), or stop other programs.",
            code="memory.ran-out",
            reason=str(short) or "none is left",
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        return missing_package(error.name)
    if isinstance(error, ImportError) and (library := missing_library(str(error))) is not None:
        return InputError(
            "A package cannot be loaded without the system library {library}. {remedy}.",
            code="program.missing-library",
            library=library,
            remedy=f"On Debian, run `sudo apt install {DEBIAN_PACKAGES[library]}`"
            if library in DEBIAN_PACKAGES
            else "Install it with the system's package manager",
        )
    if isinstance(error, OSError):
        path = error.filename
        return InputError(
            "{file}: {reason}.",
            code="file.system-error",
            path=None if path is None else str(path),
            file=str(path or "a file"),
            reason=str(error.strerror or error),
        )
    return _internal_error(error, name)


def _internal_error(error: Exception, name: str) -> InternalError:
    """Write the traceback to a file, and name the file in the error."""
    about: dict[str, Any] = {"exception": type(error).__name__}
    try:
        details = about["log"] = str(write_traceback(name))
    except OSError as trouble:
        said = f"{type(error).__name__}: {error}"
        details = f"{said} (the traceback cannot be written: {trouble.strerror})"
    return InternalError(
        "{name} failed because of an internal error. Please report it at {issues_url} with "
        "these details: {details}",
        code="program.internal-error",
        **about,
        name=name,
        issues_url=issues_url(),
        details=details,
    )


def write_traceback(name: str) -> Path:
    """Write the traceback of the current exception to a new temporary file.

    Args:
        name: Beginning of the file's name.

    Returns:
        The file.
    """
    import tempfile
    import traceback

    handle, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log")
    with open(handle, "w", encoding="utf-8") as file:
        traceback.print_exc(file=file)
    return Path(path)
