"""Timings of one request. Durations are summed over its placements and choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from baton.telemetry.names import Phase, RequestEvent
from baton.types import FinishReason
from baton.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Handoff:
    """A completed KV transfer. source, target: worker ids. num_bytes: bytes sent. checksum: see
    TicketCommitted; 0 if unknown."""

    source: str
    target: str
    num_bytes: int
    checksum: int = 0


@dataclass(slots=True)
class Timeline:
    """Times of one request, written by the reducer and by the delivery. Moments are seconds on the
    event loop's clock."""

    arrival_s: float
    tokenize_ms: float = 0.0
    queue_ms: float = 0.0
    reserve_ms: float = 0.0
    prefill_queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_exposed_ms: float = 0.0
    transfer_bytes: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    num_resumes: int = 0
    cached_tokens: int | None = None
    """Cached prompt tokens of the first prefill; None until known. Later prefills hit this
    request's own tokens."""
    decode_cached_tokens: int | None = None
    num_choices: int = 1
    is_streamed: bool = True
    """Whether tokens are sent as they arrive, instead of all at the end."""
    num_output_tokens: int = 0
    """Sum over all choices, as the next two."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    finish: FinishReason = FinishReason.NONE
    num_bypassed_tokens: int = 0
    """Maximum tokens that a decode worker prefilled above its limit, for lack of prefill
    workers."""
    has_forked: bool = False
    """Whether several choices wait independently. New phases then begin only with sent tokens."""
    on_handoff: Callable[[Handoff], None] | None = None
    """Called with each successful handoff."""
    handoffs: list[Handoff] = field(default_factory=list)
    """Successful handoffs, in order."""
    workers: dict[str, None] = field(default_factory=dict)
    """Names of all workers that it was placed on, in order."""
    events: list[tuple[RequestEvent, float]] = field(default_factory=list)
    """Events with their times."""
    _phases: list[tuple[Phase, float]] = field(default_factory=list)
    """Starts of phases; each lasts until the next one. The first is TOKENIZE, at the arrival."""
    _prefill_excess_s: float = 0.0
    """Time in PREFILL before the first token that the worker does not report: transit both ways."""

    @property
    def phase(self) -> Phase:
        """Current phase."""
        return self._phases[-1][0] if self._phases else Phase.TOKENIZE

    def enter(self, phase: Phase, now_s: float) -> None:
        """Start a phase."""
        if not self.has_forked:
            self._phases.append((phase, now_s))

    def note(self, event: RequestEvent, now_s: float) -> None:
        self.events.append((event, now_s))

    def on_local_prefill(self) -> None:
        """Start PREFILL at the opening: the owner reports a local prefill together with its first
        computed step."""
        if self.phase is Phase.RESERVE:
            self._phases[-1] = (Phase.PREFILL, self._phases[-1][1])

    def on_prefilled(self, reported_ms: float, now_s: float) -> None:
        """Record the end of a prefill. reported_ms: duration measured by the worker, queue
        included."""
        if self.first_token_s is None and self.phase is Phase.PREFILL:
            waited_s = now_s - self._phases[-1][1]
            self._prefill_excess_s += max(0.0, waited_s - reported_ms / 1e3)

    def on_committed(self, handoff: Handoff, exposed_ms: float, now_s: float) -> None:
        """Record a completed transfer. exposed_ms: transfer time not overlapped with compute."""
        self.transfer_exposed_ms += exposed_ms
        self.transfer_bytes += handoff.num_bytes
        self.handoffs.append(handoff)
        self.note(RequestEvent.COMMITTED, now_s)
        if self.on_handoff is not None:
            self.on_handoff(handoff)

    def on_tokens(self, now_s: float) -> None:
        """Record tokens that arrived and are to be sent."""
        if self.first_token_s is None:
            if self.phase is not Phase.FIRST_STEP:
                self.enter(Phase.FIRST_STEP, now_s)
        elif self.phase is not Phase.DECODE:
            self.enter(Phase.DECODE, now_s)

    def intervals(self, end_s: float) -> Iterator[tuple[Phase, float, float]]:
        """Yield (phase, start, end) without gaps, from the arrival to `end_s`."""
        phase, start_s = Phase.TOKENIZE, self.arrival_s
        for following, next_s in (*self._phases, (Phase.DECODE, end_s)):
            yield phase, start_s, max(start_s, next_s)
            phase, start_s = following, max(start_s, next_s)

    def first_token_parts_ms(self) -> dict[Phase, float]:
        """Time to first token by phase, in milliseconds; the values sum to it, and are 0 before the
        first token."""
        parts = dict.fromkeys(Phase, 0.0)
        if self.first_token_s is None:
            return parts
        for phase, start_s, end_s in self.intervals(self.first_token_s):
            parts[phase] += max(0.0, min(end_s, self.first_token_s) - start_s) * 1e3
        excess_ms = self._prefill_excess_s * 1e3
        parts[Phase.PREFILL] -= excess_ms
        parts[Phase.FIRST_STEP] += excess_ms + parts.pop(Phase.DECODE)
        return parts

    def on_token_sent(self, now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
            self._phases.append((Phase.DECODE, now_s))
        self.last_token_s = now_s

    def time_per_token_s(self) -> float | None:
        """Mean time between tokens of one choice after its first, in seconds; None if unknown."""
        first_s, last_s = self.first_token_s, self.last_token_s
        num_following = self.num_output_tokens / self.num_choices - 1
        if first_s is None or last_s is None or num_following <= 0 or not self.is_streamed:
            return None
        return (last_s - first_s) / num_following

    def name_workers(self, prefill: str, decode: str) -> None:
        """Record the serving workers; the last ones are kept."""
        self.workers |= dict.fromkeys(filter(None, (prefill, decode)))
        self.prefill_worker = prefill or self.prefill_worker
        self.decode_worker = decode or self.decode_worker

    def to_proto(self, now_s: float) -> inference_pb2.RequestTiming:
        first_s = self.first_token_s if self.first_token_s is not None else now_s
        last_s = self.last_token_s if self.last_token_s is not None else first_s
        parts = self.first_token_parts_ms()
        return inference_pb2.RequestTiming(
            tokenize_ms=self.tokenize_ms,
            queue_ms=self.queue_ms,
            reserve_ms=self.reserve_ms,
            prefill_queue_ms=self.prefill_queue_ms,
            prefill_ms=self.prefill_ms,
            transfer_exposed_ms=self.transfer_exposed_ms,
            time_to_first_token_ms=(first_s - self.arrival_s) * 1e3,
            decode_ms=(last_s - first_s) * 1e3,
            total_ms=(last_s - self.arrival_s) * 1e3,
            transfer_bytes=self.transfer_bytes,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            num_resumes=self.num_resumes,
            first_token=inference_pb2.TimeToFirstToken(
                tokenize_ms=parts[Phase.TOKENIZE],
                queue_ms=parts[Phase.QUEUE],
                reserve_ms=parts[Phase.RESERVE],
                prefill_ms=parts[Phase.PREFILL],
                first_step_ms=parts[Phase.FIRST_STEP],
            ),
        )
