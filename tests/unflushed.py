"""Tests do not wait for the disk, which took a third of the coordinator's tests.

No test cuts the power, and what a killed process wrote stays without a flush. That the product
flushes, tests/toolkit/coordinator/storage/test_flushed.py checks. Fresh processes flush, too.
"""

import os
import sqlite3
from typing import Any

CONNECT: Any = sqlite3.connect
FULL, OFF = "PRAGMA synchronous=FULL", "PRAGMA synchronous=OFF"


class _Unflushed(sqlite3.Connection):
    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        return super().execute(OFF if sql == FULL else sql, *values)


def _connect(*arguments: Any, **options: Any) -> Any:
    return CONNECT(*arguments, **{"factory": _Unflushed, **options})


def _fsync(fd: Any) -> None:
    pass


os.fsync, sqlite3.connect = _fsync, _connect
