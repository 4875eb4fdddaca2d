"""Registry interface for gateways and workers, and the embedded registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from baton.registry.registration import Registration
from baton.types import Tier


@dataclass(frozen=True, slots=True)
class WorkerAdded:
    """A worker of `tier` is listed at `address`."""

    address: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class WorkerRemoved:
    """`address` is no longer listed: its lease ended, or it drains. An open connection may be
    kept."""

    address: str


Change = WorkerAdded | WorkerRemoved


class Registry(Protocol):
    """Both ends of a registry. No request may wait for it, and neither end fails while it is
    unreachable."""

    def changes(self) -> AsyncGenerator[Change, None]:
        """Yield changes of the list, beginning with all its entries. Ends if the list can never
        change again."""
        ...

    async def announce(self, current: Callable[[], Registration | None]) -> NoReturn:
        """Keep the worker listed until cancelled, with the value of `current` at each renewal; then
        remove it.

        current: quick; returns None while the worker should not be found, so that its lease
        expires.
        """
        ...


class StaticRegistry:
    """The fixed addresses of the command line. Workers need not announce themselves."""

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
