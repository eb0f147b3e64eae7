"""The two log formats, and which messages a command shows."""

import json
import logging
import re
import time
from datetime import datetime

from device_agent.log_format import JsonFormatter, PlainFormatter, fields, show_logs

LOG = logging.getLogger("device_agent.some.module")


def test_plain_lines() -> None:
    lines: list[str] = []
    with show_logs(lines.append, PlainFormatter()):
        LOG.info("Round %d: %s", 3, "training")
        LOG.info("100%")
        LOG.debug("never shown")
        logging.getLogger("urllib3").info("of another library")
    LOG.warning("after the block")
    assert lines == ["Round 3: training", "100%"]


def test_stamped_lines() -> None:
    lines: list[str] = []
    with show_logs(lines.append, PlainFormatter(stamped=True)):
        LOG.warning("Paused.")
    matched = re.fullmatch(r"\[(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d)\] Paused\.", lines[0])
    assert matched
    assert abs(datetime.fromisoformat(matched[1]).timestamp() - time.time()) < 60


def test_json_lines() -> None:
    lines: list[str] = []
    with show_logs(lines.append, JsonFormatter()):
        LOG.info(" epoch %d", 1, extra=fields(epoch=1, loss=0.5))
        LOG.error("Failed.")
    first, second = map(json.loads, lines)
    stamp = datetime.fromisoformat(first.pop("time"))
    assert stamp.tzinfo is not None
    assert abs(stamp.timestamp() - time.time()) < 60
    assert 0 <= first.pop("elapsed_s") <= second["elapsed_s"] < 60
    assert first == {"level": "info", "message": "epoch 1", "epoch": 1, "loss": 0.5}
    assert (second["level"], second["message"]) == ("error", "Failed.")


def test_an_inner_block_replaces_the_handler_of_the_outer_one() -> None:
    outer, inner = list[str](), list[str]()
    with show_logs(outer.append, PlainFormatter()):
        with show_logs(inner.append, PlainFormatter(), logging.WARNING):
            LOG.info("one")
            LOG.warning("two")
        LOG.info("three")
    assert (outer, inner) == (["three"], ["two"])
    assert logging.getLogger("device_agent").handlers == []
