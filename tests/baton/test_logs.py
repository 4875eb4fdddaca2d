"""Lines for people on a terminal, JSON elsewhere."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.logs import MAX_ALIKE, JsonFormatter, PlainFormatter, configure_logging
from baton.supervisor.log_lines import readable


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _same_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@given(message=st.text(), request_id=st.text(min_size=1))
def test_a_record_is_one_line_of_json_whatever_it_says(message: str, request_id: str) -> None:
    record = logging.makeLogRecord({"msg": "%s", "args": (message,), "levelname": "ERROR"})
    record.request_id = request_id
    line = JsonFormatter("p").format(record)
    assert len(line.splitlines()) == 1
    entry = json.loads(line)
    assert (entry["message"], entry["request_id"], entry["process"]) == (message, request_id, "p")


def test_an_exception_is_in_the_line() -> None:
    stream = io.StringIO()
    configure_logging("info", "p", stream)
    try:
        int("wrong")
    except ValueError:
        logging.getLogger("x").exception("failed")
    assert "ValueError: invalid literal" in json.loads(stream.getvalue())["exception"]


def test_a_terminal_gets_plain_lines_from_the_level_on() -> None:
    stream = Terminal()
    configure_logging("warning", "p", stream)
    logging.getLogger("x").info("quiet")
    logging.getLogger("x").warning("loud", extra={"request_id": "r1"})
    assert stream.getvalue().endswith("WARNING x: loud [r1]\n")
    assert "quiet" not in stream.getvalue()


def test_configuring_again_replaces() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("info", "p", first)
    configure_logging("info", "p", second)
    logging.getLogger("x").info("once")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


def test_plain_lines_without_a_request() -> None:
    record = logging.makeLogRecord({"msg": "hello", "levelname": "INFO", "name": "x"})
    assert PlainFormatter().format(record).endswith("x: hello")


@pytest.mark.parametrize(
    ("ids", "told"),
    [({}, ""), ({"request_id": "r1"}, " [r1]"), ({"request_id": "r1", "trace_id": "t"}, " [r1 t]")],
)
def test_both_forms_tell_the_ids_that_are_known(ids: dict[str, str], told: str) -> None:
    record = logging.makeLogRecord({"msg": "hello", "levelname": "INFO", "name": "x", **ids})
    assert PlainFormatter().format(record).endswith(f"x: hello{told}")
    line = JsonFormatter("p").format(record)
    entry = json.loads(line)
    assert {name: entry[name] for name in ("request_id", "trace_id") if name in entry} == ids
    assert readable("p", line).endswith(f"p: hello{told}")


def test_of_errors_alike_no_more_are_written_than_a_disk_can_take() -> None:
    stream = io.StringIO()
    configure_logging("info", "p", stream)
    times_s = iter([*([0.0] * 500), 59.0, 61.0, 61.0])
    log = logging.getLogger("a")
    real = log.makeRecord

    def make_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = real(*args, **kwargs)
        if record.levelno == logging.ERROR:
            record.created = next(times_s)
        return record

    log.makeRecord = make_record  # type: ignore[method-assign]
    for number in range(502):
        log.error("number %d", number)
        log.info("a line of a request")
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert messages.count("a line of a request") == 502
    errors = [message for message in messages if message.startswith("number")]
    assert errors[:-1] == [f"number {i}" for i in range(MAX_ALIKE)]
    assert errors[-1] == f"number 501 ({501 - MAX_ALIKE} like it were left out before)"
    del log.makeRecord
