"""Leases: at most one of several processes leads, each for a term with a number of its own."""

from __future__ import annotations

from math import inf
from typing import Protocol


class Lease(Protocol):
    """A lease that several processes want, and a number that its holder leaves to the next one."""

    @property
    def lasts_s(self) -> float:
        """Seconds from its last renewal after which another process may have it."""
        ...

    async def hold(self) -> int | None:
        """Take the lease, or renew it. Return the number of the term, or None if another process
        has it, or if nobody can know. To be called several times within the lease's time; later
        terms have greater numbers."""
        ...

    async def record(self, number: int | None) -> int | None:
        """While this process has the lease: record a number above 0, or none, and return the one
        that is recorded now, 0 if there is none. None if another process has the lease, or if
        nobody can know."""
        ...

    async def close(self) -> None:
        """End its connection. A lease that is held ends by itself."""
        ...


class SoleLease:
    """The lease of a process that is alone. Implements Lease."""

    lasts_s = inf

    def __init__(self) -> None:
        self._number = 0

    async def hold(self) -> int | None:
        """See Lease. Its term counts as a person's order, which is never refused."""
        return 0

    async def record(self, number: int | None) -> int | None:
        """See Lease."""
        self._number = self._number if number is None else number
        return self._number

    async def close(self) -> None:
        """See Lease."""
