"""What a gateway measures of requests, at their end."""

from __future__ import annotations

from typing import Final

from opentelemetry.metrics import Meter

from baton.errors import (
    ClientStalled,
    DeadlineExceeded,
    EngineFault,
    HandoffFailed,
    InvalidRequest,
    NoWorkers,
    Overloaded,
    WorkerLost,
)
from baton.telemetry import Phase, RequestEvent, names
from baton.telemetry.metrics import seconds_histogram

#: Boundaries, in seconds, that the conventions for generative AI advise.
DURATION_BOUNDS_S: Final = tuple(0.01 * 2**i for i in range(14))
FIRST_TOKEN_BOUNDS_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
PER_TOKEN_BOUNDS_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
#: Parts of the time to the first token are shorter than the whole.
PHASE_BOUNDS_S: Final = (0.0001, 0.0003, *FIRST_TOKEN_BOUNDS_S)


class Instruments:
    """All of them, by what they measure."""

    def __init__(self, meter: Meter) -> None:
        self.duration = seconds_histogram(
            meter,
            "gen_ai.server.request.duration",
            "From the arrival to the end of a request.",
            DURATION_BOUNDS_S,
        )
        self.first_token = seconds_histogram(
            meter,
            "gen_ai.server.time_to_first_token",
            "From the arrival of a request to its first token.",
            FIRST_TOKEN_BOUNDS_S,
        )
        self.per_token = seconds_histogram(
            meter,
            "gen_ai.server.time_per_output_token",
            "Mean time between the tokens of a choice after its first.",
            PER_TOKEN_BOUNDS_S,
        )
        self.phase = seconds_histogram(
            meter,
            "baton.ttft.phase",
            "Parts of the time to the first token; they add up to it.",
            PHASE_BOUNDS_S,
        )
        self.decode = seconds_histogram(
            meter,
            "baton.decode.duration",
            "From the first to the last token of a request.",
            DURATION_BOUNDS_S,
        )
        counter = meter.create_counter
        self.finished = counter("baton.requests.finished", description="Requests that ended well.")
        self.failed = counter("baton.requests.failed", description="Admitted requests that failed.")
        self.refused = counter("baton.requests.refused", description="Requests never admitted.")
        self.cancelled = counter(
            "baton.requests.cancelled", description="Requests given up, by what they waited for."
        )
        self.events = counter("baton.request.events", description="What happened to requests.")
        self.resumes = counter("baton.resumes", description="Requests placed anew.")
        self.bypassed = counter(
            "baton.split.bypassed",
            description="Prompts a decode worker prefilled although prefill workers were named.",
        )
        self.tokens = counter("baton.tokens", description="Tokens of prompts and of outputs.")
        self._begin()

    def _begin(self) -> None:
        """Counters are there before they first count: what is 0 is reported as 0."""
        self.resumes.add(0)
        self.bypassed.add(0)
        for phase in Phase:
            self.cancelled.add(0, {names.STATE: phase.value})
        for refused in (InvalidRequest, Overloaded, NoWorkers):
            self.refused.add(0, {names.REASON: refused.reason})
        for failed in (WorkerLost, HandoffFailed, EngineFault, DeadlineExceeded, ClientStalled):
            self.failed.add(0, {names.REASON: failed.reason})
        for event in RequestEvent:
            self.events.add(0, {names.EVENT: event.value})
