"""Stages and tables on a terminal."""

import logging

import pytest

from toolkit.terminal_output import StageHandler


def test_a_stage_is_one_line_however_long_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    folder = "/home/somebody/" + "a long folder/" * 12
    record = logging.makeLogRecord({"msg": "results are kept in %s", "args": (folder,)})
    StageHandler().emit(record)
    printed = capsys.readouterr().err
    assert printed.partition("] ")[2] == f"results are kept in {folder}\n"
