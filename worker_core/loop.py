"""Engine loop: one thread that turns commands into steps and steps into events.

The cores of the tiers hold all state and run in this thread only. The asyncio side puts commands
into an inbox and gets one message per step. Tests drive a core directly, without a thread and under
their own clock.

The inbox never refuses a command, because most commands end or report something, and refusing them
would hold blocks forever. Admission bounds their number: new work must check `has_room` first.

The loop emits heartbeats; a loop that is silent for too long counts as stuck. Within a step it is
silent between groups of layers: milliseconds on a GPU, seconds for a long chunk of a large model on
a CPU. The bound therefore adapts to each worker: MARGIN times its longest recent silence, scaled up
for steps of more tokens, and at least the configured timeout.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from baton.types import WorkerLoad

#: Maximum interval between two heartbeats of an idle loop, in seconds; the granularity of lease
#: expiry.
HEARTBEAT_S = 0.2

#: Factor on the longest expected silence, for a busy machine.
MARGIN = 4.0

#: Bound before the first step, in seconds: kernels are compiled and memory is touched first.
FIRST_STEP_S = 60.0

#: "Recent" is the last one to two spans of this many seconds of silence within steps. Idle time
#: does not count.
SPAN_S = 60.0

CommandT = TypeVar("CommandT")
CommandT_contra = TypeVar("CommandT_contra", contravariant=True)
EventT = TypeVar("EventT")


@dataclass(frozen=True, slots=True)
class StepResult(Generic[EventT]):
    """Result of one step. is_idle: nothing to do until the next command or heartbeat."""

    events: Sequence[EventT]
    load: WorkerLoad
    is_idle: bool


class Core(Protocol[CommandT_contra, EventT]):
    """State and scheduling of a tier: commands in, events out."""

    def take(self, commands: Sequence[CommandT_contra]) -> Sequence[EventT]:
        """Apply commands. Returns the events that follow from them alone."""
        ...

    def compute(self) -> StepResult[EventT]:
        """Compute a step, if there is work."""
        ...


class EngineLoop(Generic[CommandT, EventT]):
    """Runs a core in its own thread."""

    def __init__(
        self,
        core: Core[CommandT, EventT],
        deliver: Callable[[Sequence[EventT], WorkerLoad | None], None],
        heartbeat: Heartbeat,
        *,
        name: str,
        max_num_commands: int = 65536,
    ) -> None:
        """deliver: called in the asyncio loop that called start(): before a step with the events of
        its commands, so that an offered ticket does not wait for the tokens of others, and after it
        with its events and a new load; None: as before.

        max_num_commands: queued commands above which no new work is admitted.
        """
        self._core = core
        self._deliver = deliver
        self._max_num_commands = max_num_commands
        self._inbox: deque[CommandT] = deque()
        self._wakeup = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._heartbeat = heartbeat
        self._asyncio_loop: asyncio.AbstractEventLoop | None = None
        self.ended = asyncio.Event()
        """Set in the asyncio loop once the thread has ended, for any reason."""

    def start(self) -> None:
        self._asyncio_loop = asyncio.get_running_loop()
        self._thread.start()

    def has_room(self) -> bool:
        """Whether new work may be admitted."""
        return len(self._inbox) < self._max_num_commands

    def submit(self, command: CommandT) -> None:
        """Queue a command for the next step. Thread-safe."""
        with self._wakeup:
            self._inbox.append(command)
            self._wakeup.notify()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def is_alive(self) -> bool:
        """Whether the thread runs and its last heartbeat is recent."""
        return self.is_running and self._heartbeat.age_s < self._heartbeat.max_age_s

    async def stop(self) -> None:
        """End the thread after its current step."""
        with self._wakeup:
            self._is_stopping = True
            self._wakeup.notify()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._turn()
        finally:
            self._call(self.ended.set)

    def _turn(self) -> None:
        is_idle = False
        last_load: WorkerLoad | None = None
        while (commands := self._take(wait=is_idle)) is not None:
            self._heartbeat.beat()
            if told := self._core.take(commands):
                self._call(self._deliver, told, None)
            step = self._core.compute()
            self._heartbeat.beat()
            is_idle = step.is_idle
            if step.events or step.load != last_load:
                last_load = step.load
                self._call(self._deliver, step.events, step.load)

    def _take(self, *, wait: bool) -> list[CommandT] | None:
        """Return all queued commands; with `wait`, wait for one up to the heartbeat interval. None
        once stopped."""
        with self._wakeup:
            if wait and not self._inbox and not self._is_stopping:
                self._wakeup.wait(HEARTBEAT_S)
            if self._is_stopping:
                return None
            commands = list(self._inbox)
            self._inbox.clear()
            return commands

    def _call(self, callback: Callable[..., object], *arguments: object) -> None:
        """Schedule a callback in the asyncio loop, unless it is closed."""
        loop = self._asyncio_loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(callback, *arguments)


@dataclass(frozen=True, slots=True)
class _Span:
    """Observations of one span. most_tokens: of a step; 0 without steps."""

    longest_s: float = 0.0
    most_tokens: int = 0
    total_s: float = 0.0


class SilenceBound:
    """Adaptive bound on silence. Pure. Written by one thread, readable by others."""

    def __init__(self, least_s: float) -> None:
        """least_s: lower limit of the bound."""
        self._least_s = least_s
        self._last, self._now = _Span(), _Span()

    def observe(self, num_tokens: int, silence_s: float) -> None:
        """Record a silence. num_tokens: new tokens of its step; 0 between steps."""
        span = self._now
        self._now = _Span(
            max(span.longest_s, silence_s),
            max(span.most_tokens, num_tokens),
            span.total_s + (silence_s if num_tokens else 0.0),
        )
        if self._now.total_s >= SPAN_S:
            self._last, self._now = self._now, _Span()

    def bound_s(self, num_tokens: int) -> float:
        """Maximum normal silence in a step of `num_tokens` tokens.

        Scales at most linearly with tokens, because each step has a fixed cost.
        """
        last, now = self._last, self._now
        most_tokens = max(last.most_tokens, now.most_tokens)
        if num_tokens and not most_tokens:
            return max(self._least_s, FIRST_STEP_S)
        growth = max(1.0, num_tokens / most_tokens) if num_tokens else 1.0
        return max(self._least_s, MARGIN * max(last.longest_s, now.longest_s) * growth)


class Heartbeat:
    """Time of the engine loop's last sign of life. Written by its thread before and after each step
    and at each group of layers; readable by any thread."""

    def __init__(self, stall_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """stall_timeout_s: minimum silence that counts as a stall."""
        self._clock = clock
        self._silences = SilenceBound(stall_timeout_s)
        self._beat_s = clock()
        self._num_tokens = 0

    def beat(self, num_tokens: int = 0) -> None:
        """Record a sign of life. num_tokens: new tokens of the step under way; 0 between steps."""
        now_s = self._clock()
        self._silences.observe(self._num_tokens, now_s - self._beat_s)
        self._num_tokens = num_tokens
        self._beat_s = now_s

    @property
    def age_s(self) -> float:
        """Seconds since the last beat, at least 0."""
        # Read the beat before the clock, so that a beat in between cannot make the age negative.
        beat_s = self._beat_s
        return self._clock() - beat_s

    @property
    def max_age_s(self) -> float:
        """Age in seconds above which the loop counts as stuck."""
        return self._silences.bound_s(self._num_tokens)


#: Load fields that affect placement. A decode step that only adds tokens is not published.
_placing = attrgetter(
    "num_running",
    "num_waiting",
    "num_open_tickets",
    "is_draining",
    "role",
    "is_colocated",
    "num_threads",
    "num_pending_tokens",
)


class LoadBoard:
    """Holds the engine loop's last load and wakes waiters. Belongs to one asyncio loop."""

    def __init__(self) -> None:
        self.load = WorkerLoad()
        self._changed = asyncio.Event()

    def publish(self, load: WorkerLoad) -> None:
        is_news = _placing(self.load) != _placing(load)
        self.load = load
        if is_news:
            self._changed.set()
            self._changed = asyncio.Event()

    async def wait_for_news(self, timeout_s: float) -> None:
        """Wait until a field that affects placement changes, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def wait_until(self, holds: Callable[[WorkerLoad], bool]) -> None:
        """Wait until `holds(load)`."""
        while not holds(self.load):
            await self._changed.wait()


def is_empty(load: WorkerLoad) -> bool:
    """Whether a draining worker may exit."""
    return load.num_running == load.num_waiting == load.num_open_tickets == 0
