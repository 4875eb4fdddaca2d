"""Children's log lines on the supervisor's terminal."""

from __future__ import annotations

import json
import logging
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from baton.logs import JsonFormatter
from baton.supervisor.log_lines import readable, write_if_possible


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_line_can_be_shown(line: str) -> None:
    assert "decode-0" in readable("decode-0", line)


def test_a_json_record_is_readable() -> None:
    record = logging.makeLogRecord({"msg": "took %d", "args": (3,), "levelname": "INFO"})
    record.request_id = "r1"
    text = readable("decode-0", JsonFormatter("decode-0").format(record))
    assert text.endswith("INFO    decode-0: took 3 [r1]")


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists, max_leaves=3))
def test_other_json_is_shown_as_it_is(value: object) -> None:
    line = json.dumps(value)
    assert readable("x", line) == f"x: {line}"


def test_a_disk_that_is_full_takes_nothing_and_ends_nothing() -> None:
    with open("/dev/full", "w", buffering=1) as full:
        for _ in range(3):
            write_if_possible(full, "a line\n")
        with suppress(OSError):
            full.close()
