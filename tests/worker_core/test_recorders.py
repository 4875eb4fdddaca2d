"""The tiers' recorders beside real cores, with steps told late and in any interleaving, as threads
would have it."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.commands import Abort
from baton.events import Offered, Prefilled, Tokens, is_last
from baton.telemetry import Telemetry
from baton.telemetry.metrics import SdkHistograms
from baton.types import BlockCounts, KvSource, Sample, Sampling, SequenceSpec, TierLoad, WorkerLoad
from kv_transfer.send_connection import SendDone
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape
from worker_core.commands import Command, Destination, Open, StreamCommand, StreamEvent
from worker_core.loop import LoadBoard
from worker_core.recorder import WorkerRecorder
from worker_core.telemetry import observe_worker

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Exports:
    """Telemetry that stays in this process."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        self._metrics = InMemoryMetricReader()
        tracers = TracerProvider(shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        meters = MeterProvider([self._metrics], shutdown_on_exit=False)
        # Each process has one recorder, and a meter of its own.
        self.prefill, self.decode = (
            Telemetry(
                *(tracers.get_tracer("test"), meter, SdkHistograms(meter)),
                *(True, True, lambda: None),
            )
            for meter in map(meters.get_meter, ("prefill", "decode"))
        )

    def span_names(self) -> Counter[str]:
        return Counter(span.name for span in self._spans.get_finished_spans())

    def by_state(self, name: str) -> dict[str, float]:
        """A gauge's values by the state that they are of."""
        return self.by(name, "baton.state")

    def by(self, name: str, attribute: str) -> dict[str, float]:
        """A metric's values by an attribute."""
        data = self._metrics.get_metrics_data()
        assert data is not None
        return {
            str(dict(point.attributes or {})[attribute]): point.value  # type: ignore[union-attr]
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        }

    def total(self, name: str) -> int:
        """A counter's sum over its attributes."""
        data = self._metrics.get_metrics_data()
        assert data is not None
        return sum(
            point.value  # type: ignore[union-attr, misc]
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        )


@dataclass
class Tiers:
    """One worker of each tier; `deliver` reports steps in order."""

    rng: random.Random
    now_s: float = 0.0
    exports: Exports = field(default_factory=Exports)
    live: dict[int, SequenceSpec] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    num_prefilled: int = 0
    _batches: dict[str, deque[tuple[Sequence[StreamEvent], bool]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hub = LoopbackHub()
        self.p_recorder = WorkerRecorder(self.exports.prefill, self.clock)
        self.d_recorder = WorkerRecorder(self.exports.decode, self.clock)
        shape = SimShape(num_blocks=24)
        self.prefill = SimPrefill(hub, self.clock, SimShape(num_blocks=48))
        self.decode = SimDecode(hub, self.clock, shape)
        self.prefill.submit = _observed(  # type: ignore[method-assign]
            self.prefill.inbox.append, self.p_recorder.on_command
        )
        self.decode.submit = _observed(  # type: ignore[method-assign]
            self.decode.inbox.append, self.d_recorder.on_command
        )
        # Both hand their own submit to the channel when they are made; make them hand on this one.
        self.prefill.sender._user_on_done = self.prefill.submit
        self.decode.tickets._on_event = self.decode.submit
        self._batches = {"p": deque(), "d": deque()}

    def clock(self) -> float:
        return self.now_s

    def open(self, handle: int) -> None:
        spec = SequenceSpec(
            request_id=f"r{handle}",
            prompt_token_ids=tuple(self.rng.randrange(900) for _ in range(self.rng.randint(1, 40))),
            sampling=Sampling(max_tokens=self.rng.randint(1, 30)),
            arrival_ns=handle,
            traceparent=f"00-{TRACE}-{handle + 1:016x}-01",
        )
        self.live[handle] = spec
        source = self.rng.choice([KvSource.LOCAL, *[KvSource.PREFILL] * 4])
        self.decode.open(0, handle, spec, source)

    def cancel(self, handle: int) -> None:
        self.end(handle, "cancelled")
        self.decode.submit(StreamCommand(0, handle, Abort()))
        self.prefill.submit(StreamCommand(0, handle, Abort()))

    def end(self, handle: int, how: str) -> None:
        del self.live[handle]
        self.ends[how] += 1

    def step(self, which: str) -> None:
        self.now_s += 0.001
        worker = self.prefill if which == "p" else self.decode
        self._batches[which].append((worker.take(), False))
        self._batches[which].append((worker.compute().events, True))

    def deliver(self, which: str) -> bool:
        """Tell the oldest events that were not told yet, those of a step's commands apart, first to
        the gateway, as the services do."""
        self.now_s += 0.001
        batches = self._batches[which]
        if not batches:
            return False
        events, is_over = batches.popleft()
        for addressed in events:
            if which == "p":
                self._prefilled(addressed)
            else:
                self._happened(addressed)
        recorder = self.p_recorder if which == "p" else self.d_recorder
        recorder.on_step(events, is_over=is_over)
        return True

    def _prefilled(self, addressed: StreamEvent) -> None:
        handle, event = addressed.handle, addressed.event
        self.num_prefilled += isinstance(event, Prefilled)
        if isinstance(event, Tokens) and event.finish and handle in self.live:
            self.end(handle, "finished on P")
            self.decode.submit(StreamCommand(0, handle, Abort()))

    def _happened(self, addressed: StreamEvent) -> None:
        handle, event = addressed.handle, addressed.event
        if handle not in self.live:
            return
        if isinstance(event, Offered):
            self.prefill.open(0, handle, self.live[handle], send_to=event.ticket)
        elif is_last(event):
            self.end(handle, "finished" if isinstance(event, Tokens) else type(event).__name__)


def _observed(
    submit: Callable[[Command], None], observe: Callable[[Command], None]
) -> Callable[[Command], None]:
    def both(command: Command) -> None:
        observe(command)
        submit(command)

    return both


def play(seed: int, num_sequences: int = 40) -> Tiers:
    """Everything at random until nothing is left."""
    rng = random.Random(seed)
    tiers = Tiers(rng)
    for handle in range(num_sequences):
        tiers.open(handle)
        for _ in range(rng.randint(0, 8)):
            rng.choice((tiers.step, tiers.deliver))(rng.choice("pd"))
        if tiers.live and rng.random() < 0.2:
            tiers.cancel(rng.choice(sorted(tiers.live)))
    quiet = 0
    while quiet < 3:
        for which in "pd":
            tiers.step(which)
        told = [tiers.deliver(which) for which in "pdpdpd"]
        is_busy = bool(tiers.live or tiers.prefill.inbox or tiers.decode.inbox)
        quiet = 0 if is_busy or any(tiers._batches.values()) else quiet + any(told)
    return tiers


@pytest.fixture(scope="module")
def games() -> list[Tiers]:
    return [play(seed) for seed in range(12)]


@pytest.mark.slow
def test_recorders_forget_every_request_that_is_over(games: list[Tiers]) -> None:
    for tiers in games:
        assert tiers.p_recorder._sequences == {}
        assert tiers.d_recorder._sequences == {}
        assert tiers.d_recorder._by_ticket == {}


@pytest.mark.slow
def test_spans_and_counters_agree_with_what_happened(games: list[Tiers]) -> None:
    spans: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for tiers in games:
        exports, names = tiers.exports, tiers.exports.span_names()
        assert exports.total("baton.preemptions") == tiers.ends["Preempted"]
        assert exports.total("baton.deferrals") == tiers.ends["Deferred"]
        assert exports.total("baton.sequences.failed") == tiers.ends["Failed"]
        assert names["transfer"] >= names["commit"]
        assert names["decode"] >= tiers.ends["finished"]
        assert names["prefill"] >= names["prefill queue"] > 0
        sent, received = (exports.total(f"baton.transfer.{side}") for side in ("sent", "received"))
        assert sent >= received > 0
        spans += names
        ends += tiers.ends
    assert ends["Preempted"]
    assert ends["cancelled"]
    assert spans.keys() == {
        "prefill queue",
        "prefill",
        "prefill chunk",
        "send",
        "transfer",
        "commit",
        "decode",
    }


def test_tiers_of_kv_are_reported_by_name() -> None:
    exports, board = Exports(), LoadBoard()
    observe_worker(exports.decode.meter, board)
    assert not exports.by("baton.kv.tier.hits", "baton.kv.tier")
    host = TierLoad("host", pays=True, num_bytes=7, num_hits=5, saved_ms=1500.0)
    disk = TierLoad("disk", off_reason="it is full", pays=True, num_hits=2)
    board.publish(WorkerLoad(kv_tiers=(host, disk)))
    found = {
        name: exports.by(f"baton.kv.tier.{name}", "baton.kv.tier")
        for name in ("on", "bytes", "hits", "saved")
    }
    assert found == {
        "on": {"host": 1, "disk": 0},
        "bytes": {"host": 7, "disk": 0},
        "hits": {"host": 5, "disk": 2},
        "saved": {"host": 1.5, "disk": 0},
    }


def test_window_slots_are_reported_by_workers_that_have_them() -> None:
    exports, board = Exports(), LoadBoard()
    observe_worker(exports.decode.meter, board)
    board.publish(WorkerLoad(blocks=BlockCounts(5, 3, 2)))
    assert exports.by_state("baton.kv.blocks") == {"free": 5, "cached": 3, "leased": 2}
    assert not exports.by_state("baton.kv.window_slots")
    board.publish(WorkerLoad(window_slots=BlockCounts(1, 4, 7)))
    assert exports.by_state("baton.kv.window_slots") == {"free": 1, "cached": 4, "leased": 7}


def test_an_end_of_sending_is_seen_after_the_events_of_the_step_under_way() -> None:
    exports = Exports()
    recorder = WorkerRecorder(exports.prefill, lambda: 0.0)
    spec = SequenceSpec("r", (1, 2, 3), Sampling(max_tokens=9))
    recorder.on_command(Open(0, 1, spec, KvSource.LOCAL, Destination(0)))
    recorder.on_step([])
    recorder.on_command(SendDone((0, 1), None, 24))
    # Told late: the step has begun to send, and its events are still to come.
    recorder.on_step([], is_over=False)
    recorder.on_step(
        [
            StreamEvent(0, 1, Prefilled(0, 0, 1.0, 1.0)),
            StreamEvent(0, 1, Tokens(0, (Sample(7),))),
        ]
    )
    assert exports.total("baton.transfer.sent") == 24
    assert exports.total("baton.decode.tokens") == 0
