"""A worker goes on telling the registry that it is there, whatever the registry raises; and it says
what that was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import NoReturn

import pytest

from baton.registry import Registration
from baton.registry.interface import Change
from worker_core.server import keep_announcing

NUM_FAULTS = 3


class FaultyRegistry:
    """Its first announcements end with an error that nobody foresaw; the one after stands."""

    def __init__(self) -> None:
        self.num_tries = 0
        self.stands = asyncio.Event()
        self.was_withdrawn = False

    async def changes(self) -> AsyncGenerator[Change, None]:
        raise NotImplementedError
        yield

    async def announce(self, current: Callable[[], Registration | None]) -> NoReturn:
        assert current() is None
        self.num_tries += 1
        if self.num_tries <= NUM_FAULTS:
            raise ZeroDivisionError(f"fault {self.num_tries}")
        try:
            self.stands.set()
            await asyncio.Event().wait()
        finally:
            self.was_withdrawn = True
        raise AssertionError


async def test_an_error_is_logged_and_the_worker_is_announced_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = FaultyRegistry()
    keeping = asyncio.create_task(keep_announcing(registry, lambda: None, pause_s=0.0))
    await registry.stands.wait()
    assert registry.num_tries == NUM_FAULTS + 1
    assert [record.levelname for record in caplog.records] == ["ERROR"], "not one a second"
    assert "ZeroDivisionError: fault 1" in caplog.text
    keeping.cancel()
    await asyncio.wait({keeping})
    assert keeping.cancelled()
    assert registry.was_withdrawn, "the entry is taken off the list before the worker ends"
