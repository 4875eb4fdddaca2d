"""What a registry does for a gateway and for a worker, whatever keeps it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
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
        """Keep the worker on the list, with what `current` tells at each renewal, until cancelled;
        it is taken off then.

        current: quick; None while the worker should not be found, so that its lease ends.
        """
        ...
