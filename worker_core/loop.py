"""The engine loop: one thread that turns commands into steps and steps into events.

The tiers' cores hold all state and are called by nobody else; the asyncio side puts commands into
an inbox and gets back one message per step. A test drives a core directly, without a thread and
under its own clock.

The inbox never refuses a command: most end or report something that the core was given before, and
what holds blocks until such a command would hold them for ever without it. They are bounded by what
was admitted. Work that is new asks `has_room` first, before anything is done for it.

The loop shows signs of life, and its silence may last so long before it is believed to stand still.
Within a step it is silent from one group of layers to the next: for milliseconds on a GPU, for
seconds where a large model computes a long chunk on a CPU. No one number fits all, so each worker
goes by its own: the bound is MARGIN times the longest silence that it has shown lately, more where
a step has more tokens than any of these had, and never less than what its options say.
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

#: Longest time between two heartbeats of an idle loop, in seconds. Leases expire at this grain.
HEARTBEAT_S = 0.2

#: How much longer than the longest one expected a silence may last: the machine may be busy with
#: other things.
MARGIN = 4.0

#: Bound of a worker that has computed nothing yet, in seconds: kernels are compiled and memory is
#: touched first.
FIRST_STEP_S = 60.0

#: Lately is the last one to two spans of so much silence in steps, in seconds. Time without work
#: forgets nothing.
SPAN_S = 60.0

CommandT = TypeVar("CommandT")
CommandT_contra = TypeVar("CommandT_contra", contravariant=True)
EventT = TypeVar("EventT")


@dataclass(frozen=True, slots=True)
class StepResult(Generic[EventT]):
    """What a step came to. `is_idle`: there is nothing to do before the next command or
    heartbeat."""

    events: Sequence[EventT]
    load: WorkerLoad
    is_idle: bool


class Core(Protocol[CommandT_contra, EventT]):
    """A tier's state and scheduling: commands in, events out."""

    def step(self, commands: Sequence[CommandT_contra]) -> StepResult[EventT]: ...


class EngineLoop(Generic[CommandT, EventT]):
    """Runs a core in a thread of its own."""

    def __init__(
        self,
        core: Core[CommandT, EventT],
        deliver: Callable[[Sequence[EventT], WorkerLoad], None],
        heartbeat: Heartbeat,
        *,
        name: str,
        max_num_commands: int = 65536,
    ) -> None:
        """`deliver` is called in the asyncio loop that calls start(), once per step that has events
        or a new load.

        max_num_commands: those that wait for a step when no more work should be admitted.
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
        """Set, in the asyncio loop, when the thread has ended, for whatever reason."""

    def start(self) -> None:
        self._asyncio_loop = asyncio.get_running_loop()
        self._thread.start()

    def has_room(self) -> bool:
        """Whether new work should be admitted."""
        return len(self._inbox) < self._max_num_commands

    def submit(self, command: CommandT) -> None:
        """Hand a command to the core's next step. Any thread may call this."""
        with self._wakeup:
            self._inbox.append(command)
            self._wakeup.notify()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def is_alive(self) -> bool:
        """Whether the loop turns: its thread runs, and its last heartbeat is recent."""
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
            step = self._core.step(commands)
            self._heartbeat.beat()
            is_idle = step.is_idle
            if step.events or step.load != last_load:
                last_load = step.load
                self._call(self._deliver, step.events, step.load)

    def _take(self, *, wait: bool) -> list[CommandT] | None:
        """All commands that are there; if `wait`, at the latest after a heartbeat. None when the
        loop is to end."""
        with self._wakeup:
            if wait and not self._inbox and not self._is_stopping:
                self._wakeup.wait(HEARTBEAT_S)
            if self._is_stopping:
                return None
            commands = list(self._inbox)
            self._inbox.clear()
            return commands

    def _call(self, callback: Callable[..., object], *arguments: object) -> None:
        """Have the asyncio loop call back, unless it is closed already."""
        loop = self._asyncio_loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(callback, *arguments)


@dataclass(frozen=True, slots=True)
class _Span:
    """What was seen in it. most_tokens: of a step; 0 if none was computed."""

    longest_s: float = 0.0
    most_tokens: int = 0
    total_s: float = 0.0


class SilenceBound:
    """Pure: silences in, the bound out. Written by one thread; another may ask."""

    def __init__(self, least_s: float) -> None:
        """least_s: what the bound never falls below."""
        self._least_s = least_s
        self._last, self._now = _Span(), _Span()

    def observe(self, num_tokens: int, silence_s: float) -> None:
        """A silence has ended. num_tokens: new tokens of the step that it was part of; 0 between
        steps."""
        span = self._now
        self._now = _Span(
            max(span.longest_s, silence_s),
            max(span.most_tokens, num_tokens),
            span.total_s + (silence_s if num_tokens else 0.0),
        )
        if self._now.total_s >= SPAN_S:
            self._last, self._now = self._now, _Span()

    def bound_s(self, num_tokens: int) -> float:
        """How long a silence in a step of so many tokens may last.

        Time grows with the tokens at most in proportion, as each step costs something whatever its
        size.
        """
        last, now = self._last, self._now
        most_tokens = max(last.most_tokens, now.most_tokens)
        if num_tokens and not most_tokens:
            return max(self._least_s, FIRST_STEP_S)
        growth = max(1.0, num_tokens / most_tokens) if num_tokens else 1.0
        return max(self._least_s, MARGIN * max(last.longest_s, now.longest_s) * growth)


class Heartbeat:
    """When the engine loop last showed a sign of life. Beaten by its thread, before and after every
    step and within it at every group of layers; read by any."""

    def __init__(self, stall_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """stall_timeout_s: least silence that is believed to be a standstill."""
        self._clock = clock
        self._silences = SilenceBound(stall_timeout_s)
        self._beat_s = clock()
        self._num_tokens = 0

    def beat(self, num_tokens: int = 0) -> None:
        """Show life. num_tokens: new tokens of the step that goes on now; 0 if none does."""
        now_s = self._clock()
        self._silences.observe(self._num_tokens, now_s - self._beat_s)
        self._num_tokens = num_tokens
        self._beat_s = now_s

    @property
    def age_s(self) -> float:
        """Seconds since the last beat; never negative."""
        # First the beat: the loop's thread may beat before the clock is read, and not after.
        beat_s = self._beat_s
        return self._clock() - beat_s

    @property
    def max_age_s(self) -> float:
        """Age up to which the loop is believed to be at work, in seconds."""
        return self._silences.bound_s(self._num_tokens)


#: What gateways place work by. A decode step that only adds tokens is no news.
_placing = attrgetter(
    "num_running", "num_waiting", "num_open_tickets", "is_draining", "role", "num_pending_tokens"
)


class LoadBoard:
    """Holds the load that the engine loop published last, and wakes who waits for a newer one.
    Belongs to one asyncio loop."""

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
        """Return when work might be placed differently by the load, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def wait_until(self, holds: Callable[[WorkerLoad], bool]) -> None:
        """Return when `holds` of the load."""
        while not holds(self.load):
            await self._changed.wait()


def is_empty(load: WorkerLoad) -> bool:
    """Whether a draining worker may go."""
    return load.num_running == load.num_waiting == load.num_open_tickets == 0
