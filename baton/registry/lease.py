"""Leases: at most one of several processes leads, each for a term with a number of its own."""

from __future__ import annotations

from typing import Protocol


class Lease(Protocol):
    """A lease that several processes want."""

    async def hold(self) -> int | None:
        """Take the lease, or renew it. Return the number of the term, or None if another process
        has it, or if nobody can know. To be called several times within the lease's time; later
        terms have greater numbers."""
        ...

    async def close(self) -> None:
        """End its connection. A lease that is held ends by itself."""
        ...


class SoleLease:
    """The lease of a process that is alone. Implements Lease."""

    async def hold(self) -> int | None:
        """See Lease. Its term counts as a person's order, which is never refused."""
        return 0

    async def close(self) -> None:
        """See Lease."""
