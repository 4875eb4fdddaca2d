"""Reports one request's life to telemetry: its span with a child per phase, and the metrics of its
end.

A request writes its timeline as it goes; everything else happens once, when it is over. What is
reported are names, counts and times: never text of the prompt or the answer, nor messages of
errors, which may repeat it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.trace import Span, SpanKind, set_span_in_context

from baton.errors import (
    BatonError,
    Cancelled,
    ClientStalled,
    DeadlineExceeded,
    EngineFault,
    HandoffFailed,
    InvalidRequest,
    NoWorkers,
    Overloaded,
    WorkerLost,
)
from baton.telemetry import Phase, RequestEvent, Telemetry, names
from baton.telemetry.metrics import Counts, SecondsHistograms
from baton.telemetry.names import SpanName
from baton.telemetry.rate_limit import RateLimit
from baton.telemetry.spans import (
    SpanWriter,
    WallClock,
    context_of_metadata,
    set_error,
)
from baton.types import FinishReason, SequenceSpec
from gateway.telemetry.timing import Handoff, Timeline

_log = logging.getLogger(__name__)

#: Longest time between two warnings of one kind, in seconds.
WARN_INTERVAL_S = 10.0

_SPAN_NAMES: Mapping[Phase, SpanName] = {
    Phase.TOKENIZE: SpanName.TOKENIZE,
    Phase.QUEUE: SpanName.QUEUE,
    Phase.RESERVE: SpanName.RESERVE,
    Phase.PREFILL: SpanName.AWAIT_PREFILL,
    Phase.FIRST_STEP: SpanName.STREAM,
    Phase.DECODE: SpanName.STREAM,
}
#: Phases that wait for another process.
_REMOTE = frozenset({Phase.RESERVE, Phase.PREFILL})
#: What the parts of the time to the first token are called in metrics.
_PARTS = (Phase.QUEUE, Phase.TOKENIZE, Phase.RESERVE, Phase.PREFILL, Phase.FIRST_STEP)
_EXPOSED = "transfer_exposed"
#: Ends that somebody should look into.
_SERVER_FAULTS = frozenset({EngineFault.reason, WorkerLost.reason, HandoffFailed.reason})
_FINISH_NAMES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
#: Handoffs kept for the page's map.
_NUM_KEPT = 64

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
    """What a gateway measures of requests, at their end."""

    def __init__(self, meter: Meter, histograms: SecondsHistograms) -> None:
        self.duration = histograms.create(
            "gen_ai.server.request.duration",
            "From the arrival to the end of a request.",
            DURATION_BOUNDS_S,
        )
        self.first_token = histograms.create(
            "gen_ai.server.time_to_first_token",
            "From the arrival of a request to its first token.",
            FIRST_TOKEN_BOUNDS_S,
        )
        self.per_token = histograms.create(
            "gen_ai.server.time_per_output_token",
            "Mean time between the tokens of a choice after its first.",
            PER_TOKEN_BOUNDS_S,
        )
        self.phase = histograms.create(
            "baton.ttft.phase",
            "Parts of the time to the first token; they add up to it.",
            PHASE_BOUNDS_S,
        )
        self.decode = histograms.create(
            "baton.decode.duration",
            "From the first to the last token of a request.",
            DURATION_BOUNDS_S,
        )
        self.finished = Counts(
            meter,
            "baton.requests.finished",
            "Requests that ended well.",
            "gen_ai.response.finish_reason",
        )
        self.failed = Counts(
            meter,
            "baton.requests.failed",
            "Admitted requests that failed.",
            names.REASON,
            *(e.reason for e in (WorkerLost, HandoffFailed, EngineFault)),
            *(e.reason for e in (DeadlineExceeded, ClientStalled)),
        )
        self.refused = Counts(
            meter,
            "baton.requests.refused",
            "Requests never admitted.",
            names.REASON,
            *(e.reason for e in (InvalidRequest, Overloaded, NoWorkers)),
        )
        self.cancelled = Counts(
            meter,
            "baton.requests.cancelled",
            "Requests given up, by what they waited for.",
            names.STATE,
            *(phase.value for phase in Phase),
        )
        self.events = Counts(
            meter,
            "baton.request.events",
            "What happened to requests.",
            names.EVENT,
            *(event.value for event in RequestEvent),
        )
        self.resumes = Counts(meter, "baton.resumes", "Requests placed anew.")
        self.bypassed = Counts(
            meter,
            "baton.split.bypassed",
            "Prompts a decode worker prefilled although prefill workers were named.",
        )
        self.tokens = Counts(
            meter, "baton.tokens", "Tokens of prompts and of outputs.", names.TOKEN_TYPE
        )


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request, while it lasts. `timeline` is written by its driver; the rest by the service."""

    timeline: Timeline
    span: Span
    arrival_ns: int
    """Since the epoch."""
    common: Mapping[str, str]
    """What all that is reported of it is labelled with."""
    spec: SequenceSpec | None = None


class RecentHandoffs:
    """The last handoffs that ended well, for the page's live map."""

    def __init__(self) -> None:
        self.total = 0
        """Since the start of this process."""
        self.total_bytes = 0
        self._last: deque[Handoff] = deque(maxlen=_NUM_KEPT)

    def add(self, handoff: Handoff) -> None:
        self.total += 1
        self.total_bytes += handoff.num_bytes
        self._last.append(handoff)

    def numbered(self) -> Iterator[tuple[int, Handoff]]:
        """The last ones in order, each with how many there were up to it."""
        return enumerate(self._last, self.total - len(self._last) + 1)


class GatewayRecorder:
    """Belongs to one event loop. clock: of the timelines, in seconds.

    defer: calls what reports a request that has ended. An event loop's call_soon lets the last
    bytes of the answer leave first, which are sent when a turn of the loop ends.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        clock: Callable[[], float],
        defer: Callable[[Callable[[], None]], object] = lambda report: report(),
    ) -> None:
        self._telemetry = telemetry
        self._defer = defer
        self._common: dict[str, Mapping[str, str]] = {}
        """By names of spans: what all that is reported of such requests is labelled with."""
        self._clock = clock
        self._instruments = Instruments(telemetry.meter, telemetry.histograms)
        self.num_active = 0
        """Requests under way."""
        self.handoffs = RecentHandoffs()
        self._bypass_warnings = RateLimit(WARN_INTERVAL_S, clock)
        telemetry.meter.create_observable_gauge(
            "baton.requests.active", [self._observe_active], description="Requests under way."
        )

    def refuse(self, reason: str) -> None:
        """A request was refused before it was known which model it is for."""
        if self._telemetry.has_metrics:
            self._instruments.refused.add(1, reason)

    @contextmanager
    def recording(
        self, metadata: Iterable[tuple[str, str | bytes]] | None, model: str, *, is_chat: bool
    ) -> Iterator[RequestRecord]:
        """Record a request that arrives now, and ends with the body."""
        operation = "chat" if is_chat else "text_completion"
        name = f"{operation} {model}"
        common = self._common.get(name)
        if common is None:
            common = self._common[name] = {
                names.OPERATION_NAME: operation,
                names.PROVIDER_NAME: names.PROVIDER,
                names.REQUEST_MODEL: model,
                names.RESPONSE_MODEL: model,
            }
        arrival_s, arrival_ns = self._clock(), time.time_ns()
        span = self._telemetry.tracer.start_span(
            name,
            context_of_metadata(metadata),
            kind=SpanKind.SERVER,
            attributes=common,
            start_time=arrival_ns,
        )
        timeline = Timeline(arrival_s, on_handoff=self.handoffs.add)
        record = RequestRecord(timeline, span, arrival_ns, common)
        self.num_active += 1
        error: str | None = EngineFault.reason
        try:
            yield record
            error = None
        except BatonError as failure:
            error = failure.reason
            raise
        except asyncio.CancelledError:
            error = Cancelled.reason
            raise
        finally:
            self.num_active -= 1
            now_s = self._clock()
            if error == Cancelled.reason:
                timeline.note(RequestEvent.CANCELLED, now_s)
            self._defer(partial(self._report, record, error, now_s))

    def _report(self, record: RequestRecord, error: str | None, now_s: float) -> None:
        """A request is over. error: the reason of its failure, one of baton.errors.BY_REASON; None
        if it ended well."""
        if self._telemetry.has_metrics:
            self._measure(record, error, now_s)
        if record.span.is_recording():
            self._trace(record, error, now_s)
        _log_life(record, error, now_s)
        if record.timeline.num_bypassed_tokens:
            self._warn_of_bypass(record)

    # Spans

    def _trace(self, record: RequestRecord, error: str | None, now_s: float) -> None:
        span, timeline = record.span, record.timeline
        wall = WallClock(record.arrival_ns - int(timeline.arrival_s * 1e9))
        if record.spec is not None:
            span.set_attributes(_request_attributes(record.spec))
        span.set_attributes(_response_attributes(timeline))
        for event, at_s in timeline.events:
            span.add_event(event.value, timestamp=wall.ns(at_s))
        if error:
            set_error(span, error)
        writer = SpanWriter(self._telemetry.tracer, wall)
        parent = set_span_in_context(span)
        for name, phase, start_s, end_s in _joined(timeline, now_s):
            kind = SpanKind.CLIENT if phase in _REMOTE else SpanKind.INTERNAL
            writer.write(name, parent, start_s, end_s, kind=kind)
        span.end(wall.ns(now_s))

    # Metrics

    def _measure(self, record: RequestRecord, error: str | None, now_s: float) -> None:
        timeline, own = record.timeline, self._instruments
        failure = {names.ERROR_TYPE: error} if error else {}
        own.duration.record(now_s - timeline.arrival_s, {**record.common, **failure})
        for event, _ in timeline.events:
            own.events.add(1, event.value)
        if timeline.num_resumes:
            own.resumes.add(timeline.num_resumes)
        if timeline.num_bypassed_tokens:
            own.bypassed.add(1)
        if record.spec is not None:
            num_prompt_tokens = len(record.spec.prompt_token_ids)
            own.tokens.add(num_prompt_tokens, "input")
        own.tokens.add(timeline.num_output_tokens, "output")
        if error is None:
            finish = _FINISH_NAMES.get(timeline.finish, "unknown")
            own.finished.add(1, finish)
            self._measure_times(timeline, record.common)
        elif error == Cancelled.reason:
            own.cancelled.add(1, timeline.phase.value)
        elif any(event is RequestEvent.PLACED for event, _ in timeline.events):
            own.failed.add(1, error)
        else:
            own.refused.add(1, error)

    def _measure_times(self, timeline: Timeline, common: Mapping[str, str]) -> None:
        first_s, last_s = timeline.first_token_s, timeline.last_token_s
        if first_s is None or last_s is None:
            return
        own = self._instruments
        own.first_token.record(first_s - timeline.arrival_s, common)
        own.decode.record(last_s - first_s)
        per_token_s = timeline.time_per_token_s()
        if per_token_s is not None:
            own.per_token.record(per_token_s, common)
        parts = timeline.first_token_parts_ms()
        for part in _PARTS:
            own.phase.record(parts[part] / 1e3, {names.PHASE: part.value})
        # The first token does not wait for the transfer: see TimeToFirstToken in inference.proto.
        own.phase.record(0.0, {names.PHASE: _EXPOSED})

    def _observe_active(self, options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG002
        yield Observation(self.num_active)

    def _warn_of_bypass(self, record: RequestRecord) -> None:
        num_requests = self._bypass_warnings.take()
        if num_requests is not None:
            _log.warning(
                "%d requests were prefilled by decode workers, the last one with %d tokens, "
                "although prefill workers were named: none of them was ready for it "
                "(see `baton status`)",
                num_requests,
                record.timeline.num_bypassed_tokens,
                extra=_log_ids(record),
            )


def _joined(timeline: Timeline, end_s: float) -> list[tuple[SpanName, Phase, float, float]]:
    """The timeline's intervals as spans; neighbours of one name are one."""
    spans: list[tuple[SpanName, Phase, float, float]] = []
    for phase, start_s, stop_s in timeline.intervals(end_s):
        name = _SPAN_NAMES[phase]
        if spans and spans[-1][0] is name:
            spans[-1] = (name, phase, spans[-1][2], stop_s)
        elif stop_s > start_s:
            spans.append((name, phase, start_s, stop_s))
    return spans


def _log_life(record: RequestRecord, error: str | None, now_s: float) -> None:
    """What happened to a request, for debugging, and a line of its end, without any text of it: a
    warning if the servers are at fault, else for debugging."""
    level = logging.WARNING if error in _SERVER_FAULTS else logging.DEBUG
    if not _log.isEnabledFor(level):
        return
    timeline, ids = record.timeline, _log_ids(record)
    for event, at_s in timeline.events:
        after_ms = (at_s - timeline.arrival_s) * 1e3
        _log.debug("%s after %.1f ms", event.value, after_ms, extra=ids)
    first_s = timeline.first_token_s
    first = "never" if first_s is None else f"{(first_s - timeline.arrival_s) * 1e3:.1f} ms"
    _log.log(
        level,
        "request over: %s, %d tokens of output, the first after %s, %.1f ms in all, "
        "placed anew %d times, by %s and %s",
        error or _FINISH_NAMES.get(timeline.finish, "no finish"),
        timeline.num_output_tokens,
        first,
        (now_s - timeline.arrival_s) * 1e3,
        timeline.num_resumes,
        timeline.prefill_worker or "no prefill worker",
        timeline.decode_worker or "no decode worker",
        extra=ids,
    )


def _log_ids(record: RequestRecord) -> dict[str, str]:
    ids = {"request_id": record.spec.request_id if record.spec else ""}
    context = record.span.get_span_context()
    return {**ids, "trace_id": f"{context.trace_id:032x}"} if context.is_valid else ids


def _request_attributes(spec: SequenceSpec) -> dict[str, str | int | float | bool]:
    sampling = spec.sampling
    return {
        names.REQUEST_ID: spec.request_id,
        names.RESPONSE_ID: spec.request_id,
        names.REQUEST_STREAM: True,
        names.REQUEST_MAX_TOKENS: sampling.max_tokens,
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_K: sampling.top_k,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
        names.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        names.USAGE_INPUT_TOKENS: len(spec.prompt_token_ids),
    }


def _response_attributes(timeline: Timeline) -> dict[str, str | int | float | tuple[str, ...]]:
    attributes: dict[str, str | int | float | tuple[str, ...]] = {
        names.USAGE_OUTPUT_TOKENS: timeline.num_output_tokens,
        names.USAGE_CACHE_READ_INPUT_TOKENS: max(
            timeline.cached_tokens or 0, timeline.decode_cached_tokens or 0
        ),
        names.TRANSFER_BYTES: timeline.transfer_bytes,
        names.TRANSFER_EXPOSED_MS: timeline.transfer_exposed_ms,
        names.PREFILL_WORKER: timeline.prefill_worker,
        names.DECODE_WORKER: timeline.decode_worker,
    }
    if timeline.first_token_s is not None:
        first_s = timeline.first_token_s - timeline.arrival_s
        attributes[names.RESPONSE_TIME_TO_FIRST_CHUNK] = first_s
    if timeline.finish is not FinishReason.NONE:
        attributes[names.RESPONSE_FINISH_REASONS] = (_FINISH_NAMES[timeline.finish],)
    return attributes
