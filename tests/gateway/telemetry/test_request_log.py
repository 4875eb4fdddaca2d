"""What the gateway's log says of one request: how it ended, never what it was about."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import pytest

from baton.errors import BatonError, Cancelled, EngineFault
from baton.telemetry import no_telemetry
from gateway.telemetry.recorder import GatewayRecorder


@pytest.mark.parametrize(
    ("error", "end", "level"),
    [
        (None, "no finish", logging.DEBUG),
        (asyncio.CancelledError(), Cancelled.reason, logging.DEBUG),
        (EngineFault("stuck"), EngineFault.reason, logging.WARNING),
    ],
)
def test_one_line_per_request_and_faults_of_ours_are_warnings(
    caplog: pytest.LogCaptureFixture, error: BaseException | None, end: str, level: int
) -> None:
    caplog.set_level(logging.DEBUG, "gateway.telemetry.recorder")
    now_s = 1.0
    recorder = GatewayRecorder(no_telemetry(), lambda: now_s)
    with (
        suppress(BatonError, asyncio.CancelledError),
        recorder.recording((), "m", is_chat=False) as record,
    ):
        record.timeline.first_token_s = 1.5
        record.timeline.num_output_tokens = 7
        record.timeline.decode_worker = "decode-0"
        now_s = 3.0
        if error:
            raise error
    (line,) = [entry for entry in caplog.records if entry.getMessage().startswith("request over")]
    assert line.levelno == level
    assert line.getMessage() == (
        f"request over: {end}, 7 tokens of output, the first after 500.0 ms, "
        "2000.0 ms in all, placed anew 0 times, by no prefill worker and decode-0"
    )
