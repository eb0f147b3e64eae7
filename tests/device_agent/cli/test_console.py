"""How both commands end: exit codes, errors as text and JSON, and tracebacks in files."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest

from commands import Agent, Done, environment, run_code
from device_agent.cli.console import print_json, run
from profiles import errors
from profiles.project_urls import issues_url

CODES = {
    errors.InputError: 2,
    errors.ModelError: 2,
    errors.SpecError: 2,
    errors.DataError: 2,
    errors.BundleError: 2,
    errors.UpdateError: 2,
    errors.ExportError: 3,
    errors.VerificationError: 4,
    errors.StorageError: 2,
    errors.LimitError: 5,
    errors.DoesNotFitError: 5,
    errors.NothingFitsError: 5,
    errors.ClientError: 6,
    errors.AuthorisationError: 6,
    errors.TrustError: 6,
    errors.UnstableError: 7,
    errors.RegressionError: 8,
}
PROGRAM = """
import click
from device_agent.cli.console import run

@click.command()
def work():
    {body}

run(work, "edgetailor-agent")
"""


def program(folder: Path, body: str) -> Done:
    """Run a command with this `body` in a process. Its temporary files are in `folder`."""
    return run_code(PROGRAM.format(body=body), cwd=folder, TMPDIR=str(folder))


def test_an_internal_error(tmp_path: Path) -> None:
    done = program(tmp_path, "print(1 / 0)")
    [log] = tmp_path.iterdir()
    assert done == Done(
        70,
        "",
        "Error: edgetailor-agent failed because of an internal error. Please report it at "
        f"{issues_url()} with these details: {tmp_path}/{log.name}\n",
    )
    assert log.name.startswith("edgetailor-agent-")
    text = log.read_text()
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("\nZeroDivisionError: division by zero\n")


def test_an_internal_error_without_a_log(tmp_path: Path) -> None:
    done = program(tmp_path, "import tempfile; tempfile.tempdir = 'nowhere'; print(1 / 0)")
    assert done == Done(
        70,
        "",
        "Error: edgetailor-agent failed because of an internal error. Please report it at "
        f"{issues_url()} with these details: ZeroDivisionError: division by zero (the "
        "traceback cannot be written: No such file or directory)\n",
    )


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        ("MemoryError", "none is left"),
        ("MemoryError('17 bytes')", "17 bytes"),
        ("OSError(12, 'Cannot allocate memory')", "[Errno 12] Cannot allocate memory"),
        ("ImportError('a.so: failed to map segment')", "a.so: failed to map segment"),
        ("ImportError('std::bad_alloc')", "std::bad_alloc"),
        ('RuntimeError("can\'t alloc")', "can't alloc"),
    ],
)
def test_memory_that_runs_out_anywhere(tmp_path: Path, raised: str, reason: str) -> None:
    assert program(tmp_path, f"raise {raised}") == Done(
        5,
        "",
        f"Error: Memory ran out: {reason}. Allow this process more memory (ulimit, --max-memory, "
        "MemoryMax), or stop other programs.\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_the_system_lacks(tmp_path: Path) -> None:
    said = "numpy failed: libstdc++.so.6: cannot open shared object file: No such file or directory"
    assert program(tmp_path, f"raise ImportError({said!r})") == Done(
        2,
        "",
        "Error: A package cannot be loaded without the system library libstdc++.so.6. On Debian, "
        "run `sudo apt install libstdc++6`.\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_every_device_needs(tmp_path: Path) -> None:
    done = program(tmp_path, "raise ModuleNotFoundError('it is gone', name='numpy.linalg')")
    assert done.stderr.endswith("is not installed. Run `pip install numpy`.\n")


def test_success_leaves_no_log(tmp_path: Path) -> None:
    assert program(tmp_path, "print('fine')") == Done(0, "fine\n", "")
    assert list(tmp_path.iterdir()) == []


def test_every_error_has_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    known = {kind for kind in kinds if issubclass(kind, Exception)}
    assert known == {errors.EdgeTailorError, *CODES}
    for kind, code in CODES.items():
        assert ended(kind("It went wrong.")) == code
        assert capsys.readouterr() == ("", "Error: It went wrong.\n")


def test_other_endings(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(KeyboardInterrupt()) == 130
    assert capsys.readouterr() == ("", "\nInterrupted.\n")
    assert ended(PermissionError(13, "Permission denied", "/srv/x")) == 2
    assert capsys.readouterr() == ("", "Error: /srv/x: Permission denied.\n")
    assert ended(click.UsageError("Give one.")) == 2
    assert capsys.readouterr().err.endswith("Error: Give one.\n")
    assert ended(click.exceptions.Exit(5)) == 5
    assert ended(None) == 0


@pytest.mark.parametrize(
    ("error", "exit_code", "about"),
    [
        (
            errors.SpecError("Unknown family 'x'.", code="spec.unknown-family", family="x"),
            2,
            {"code": "spec.unknown-family", "message": "Unknown family 'x'.", "family": "x"},
        ),
        (
            PermissionError(13, "Permission denied", "/srv/x"),
            2,
            {
                "code": "file.system-error",
                "message": "/srv/x: Permission denied.",
                "file": "/srv/x",
                "path": "/srv/x",
                "reason": "Permission denied",
            },
        ),
        (
            click.UsageError("Give one."),
            2,
            {"code": "option.usage", "message": "Give one.", "problem": "Give one."},
        ),
        (KeyboardInterrupt(), 130, {"code": "program.interrupted", "message": "Interrupted."}),
        (
            MemoryError("17 bytes"),
            5,
            {
                "code": "memory.ran-out",
                "message": "Memory ran out: 17 bytes. Allow this process more memory (ulimit, "
                "--max-memory, MemoryMax), or stop other programs.",
                "reason": "17 bytes",
            },
        ),
    ],
)
def test_errors_as_json(
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    exit_code: int,
    about: dict[str, object],
) -> None:
    assert ended(error, as_json=True) == exit_code
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"version": 1, "error": about}
    assert str(about["message"]) in printed.err


def test_an_error_after_the_result_leaves_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(errors.UnstableError("Too hot."), as_json=True, result='{"x": 1}') == 7
    assert capsys.readouterr() == ('{"x": 1}\n', "Error: Too hot.\n")
    assert ended(errors.InputError("No.", code="file.unreadable"), as_json=True) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "file.unreadable"


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (("trian", "--json"), {"code": "option.unknown-command", "possibilities": ["train"]}),
        (
            ("train", "b", "--seedd", "1", "--json"),
            {"code": "option.unknown", "option": "--seedd", "possibilities": ["--seed"]},
        ),
        (("train", "b", "--data", "x", "--json"), {"code": "option.missing", "option": "--out"}),
        (
            ("train", "b", "--data", "x", "--out", "u", "--threads", "x", "--json"),
            {"code": "option.invalid-value", "option": "--threads"},
        ),
        (("profile", "b", "--sustained", "10min", "--json"), {"option": "--sustained"}),
        (("status", "--state", "nowhere", "--json"), {"code": "state.not-joined"}),
    ],
)
def test_mistakes_in_arguments_as_json(
    agent: Agent, arguments: tuple[str, ...], about: dict[str, object]
) -> None:
    done = agent(*arguments)
    assert done.code == 2
    error = json.loads(done.stdout)["error"]
    assert done.stderr.endswith(f"Error: {error['message']}\n")
    assert {name: error.get(name) for name in about} == about


def test_a_typo_is_found_fast_and_answered(agent: Agent) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = agent("profil", "bundle")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr.endswith("Error: No such command 'profil'. Did you mean 'profile'?\n")
    # Of this interpreter, which starts without the runtime and without torch.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def ended(error: BaseException | None, as_json: bool = False, result: str | None = None) -> int:
    """The exit code of a command that prints `result`, if there is one, and then raises `error`."""

    @click.command()
    @click.option("--json", "as_json", is_flag=True)
    def work(as_json: bool) -> None:
        if result is not None:
            print_json(result)
        if error is not None:
            raise error

    arguments, sys.argv = sys.argv, ["work", *["--json"] * as_json]
    try:
        with pytest.raises(SystemExit) as stop:
            run(work, "work")
    finally:
        sys.argv = arguments
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    body = "[click.echo('x' * 1000) for _ in range(10000)]"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        cwd=tmp_path,
        env=environment(TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with process:
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_parsing_arguments_imports_no_heavy_library() -> None:
    done = run_code("import sys, device_agent.cli; print(*sys.modules)").succeeded()
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded & {"numpy", "onnxruntime", "torch", "cryptography", "urllib3"} == set()
