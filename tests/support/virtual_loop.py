"""An asyncio event loop under a virtual clock: when nothing is ready, the clock jumps to the next
timer.

A run takes no real time for waiting and is deterministic: callbacks run in the order in which they
were scheduled, timers in the order of their times, and what is sent to a thread runs at once in the
loop itself. Nothing outside the loop can wake it, so code under it does no real I/O and starts no
threads. When no callback is ready and no timer is set, nothing can ever happen again: `Deadlock` is
raised, naming the tasks that wait and where.

    def test_something() -> None:
        result = run_virtual(main())
"""

from __future__ import annotations

import asyncio
import io
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
ArgsT = Any


class Deadlock(AssertionError):
    """Tasks wait, but nothing is scheduled that could wake them."""


class VirtualTimeOver(AssertionError):
    """The run went on past the limit of virtual time; something keeps setting timers."""


class _JumpingSelector(selectors.SelectSelector):
    """Waits by moving the clock. Sees no file events, not even those of the loop's own wake-up
    pipe."""

    def __init__(self, wait: Callable[[float | None], None]) -> None:
        super().__init__()
        self._wait = wait

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._wait(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. `time()` is virtual seconds since its start, from 0."""

    def __init__(self, *, max_time_s: float = 86_400.0) -> None:
        self._now_s = 0.0
        self._max_time_s = max_time_s
        super().__init__(_JumpingSelector(self._wait))

    def time(self) -> float:
        return self._now_s

    def run_in_executor(  # type: ignore[override]
        self, _executor: Executor | None, func: Callable[..., ResultT], *args: ArgsT
    ) -> asyncio.Future[ResultT]:
        """Run `func` at once, in this thread: threads have no place under a virtual clock."""
        future: asyncio.Future[ResultT] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whatever func raises belongs to who awaits the future
            future.set_exception(error)
        return future

    def _wait(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            raise Deadlock(f"at {self._now_s} s nothing is scheduled\n{self._waiting_tasks()}")
        if timeout_s <= 0:
            return
        self._now_s += timeout_s
        if self._now_s > self._max_time_s:
            raise VirtualTimeOver(f"past {self._max_time_s} s\n{self._waiting_tasks()}")

    def _waiting_tasks(self) -> str:
        text = io.StringIO()
        for task in asyncio.all_tasks(self):
            task.print_stack(limit=3, file=text)
        return text.getvalue()


def run_virtual(
    main: Coroutine[Any, Any, ResultT],
    *,
    max_time_s: float = 86_400.0,
    on_unhandled: Callable[[dict[str, Any]], None] | None = None,
) -> ResultT:
    """Run `main` to its end in a fresh virtual loop, and return its result.

    Errors that no task retrieves, and exceptions in callbacks, go to `on_unhandled`; by default the
    first of them is raised when `main` has ended. Raises Deadlock or VirtualTimeOver.
    """
    unhandled: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(max_time_s=max_time_s)) as runner:
        runner.get_loop().set_exception_handler(
            lambda _, context: (on_unhandled or unhandled.append)(context)
        )
        result = runner.run(main)
    for context in unhandled:
        raise AssertionError(context["message"]) from context.get("exception")
    return result
