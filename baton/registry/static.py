"""The registry that is embedded: the addresses of the command line, for good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NoReturn

from baton.registry.interface import Change, WorkerAdded
from baton.registry.registration import Registration
from baton.types import Tier


class StaticRegistry:
    """A list that never changes. Workers need not tell anybody that they are there."""

    def __init__(self, prefills: Sequence[str] = (), decodes: Sequence[str] = ()) -> None:
        self._changes = (
            *(WorkerAdded(address, Tier.PREFILL) for address in prefills),
            *(WorkerAdded(address, Tier.DECODE) for address in decodes),
        )

    async def changes(self) -> AsyncGenerator[Change, None]:
        """See Registry."""
        for change in self._changes:
            yield change

    async def announce(self, current: Callable[[], Registration | None]) -> NoReturn:  # noqa: ARG002
        """See Registry."""
        await asyncio.get_running_loop().create_future()
        raise RuntimeError("nobody sets that future")
