"""What a registry does for a gateway and for a worker, and the one that is embedded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from baton.registry.registration import Registration
from baton.types import Tier


@dataclass(frozen=True, slots=True)
class WorkerAdded:
    """A worker of `tier` is to be found at `address`."""

    address: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class WorkerRemoved:
    """`address` is listed no more: its lease ended, or it drains. A connection that stands may well
    be kept."""

    address: str


Change = WorkerAdded | WorkerRemoved


class Registry(Protocol):
    """Both ends. Neither may be awaited by a request, and neither fails when the registry cannot be
    reached."""

    def changes(self) -> AsyncGenerator[Change, None]:
        """What becomes of the list, beginning with all that are on it. Ends if it never changes
        again."""
        ...

    async def announce(self, current: Callable[[], Registration | None]) -> NoReturn:
        """Keep the worker on the list, with what `current` gives at each renewal, until cancelled;
        it is taken off then.

        current: quick; None while the worker should not be found, so that its lease ends.
        """
        ...


class StaticRegistry:
    """The addresses of the command line, for good. Workers need not announce themselves."""

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
