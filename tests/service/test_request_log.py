"""What the gateway's log says of one request: how it ended, never what it was about."""

from __future__ import annotations

import logging

import pytest

from baton.errors import Cancelled, EngineFault
from baton.telemetry import no_telemetry
from gateway.telemetry.recorder import GatewayRecorder


@pytest.fixture
def recorder() -> GatewayRecorder:
    return GatewayRecorder(no_telemetry(), "m", lambda: 3.0)


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (None, logging.DEBUG),
        (Cancelled.reason, logging.DEBUG),
        (EngineFault.reason, logging.WARNING),
    ],
)
def test_one_line_per_request_and_faults_of_ours_are_warnings(
    recorder: GatewayRecorder,
    caplog: pytest.LogCaptureFixture,
    error: str | None,
    level: int,
) -> None:
    caplog.set_level(logging.DEBUG, "gateway.telemetry.recorder")
    record = recorder.begin((), 1.0, is_chat=False)
    record.timeline.first_token_s = 1.5
    record.timeline.num_output_tokens = 7
    record.timeline.decode_worker = "decode-0"
    recorder.end(record, error)
    (line,) = [entry for entry in caplog.records if entry.getMessage().startswith("request over")]
    assert line.levelno == level
    assert line.getMessage() == (
        f"request over: {error or 'no finish'}, 7 tokens of output, the first after 500.0 ms, "
        "2000.0 ms in all, placed anew 0 times, by no prefill worker and decode-0"
    )
