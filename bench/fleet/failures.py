"""What fails in a simulated fleet, and comes back. A kind of failure is a class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from bench.fleet.gateways import Registry


class Breakable(Protocol):
    """A fleet, to its failures."""

    registry: Registry

    def lose_workers(self, one_of: int, first: int) -> Callable[[], None]:
        """Lose one worker of so many; they come back with empty caches."""
        ...

    def lose_gateways(self, one_of: int, first: int) -> Callable[[], None]:
        """Lose one gateway of so many; clients go on at others."""
        ...


class Failure(Protocol):
    """at_s: from the start of the load. down_s: until all is back. Seconds."""

    @property
    def at_s(self) -> float: ...
    @property
    def down_s(self) -> float: ...

    def begin(self, fleet: Breakable, /) -> Callable[[], None]:
        """Return what ends it."""
        ...


@dataclass(frozen=True, slots=True)
class WorkersLost:
    """One worker of so many."""

    at_s: float
    down_s: float
    one_of: int
    first: int = 0

    def begin(self, fleet: Breakable) -> Callable[[], None]:
        """See Failure."""
        return fleet.lose_workers(self.one_of, self.first)


@dataclass(frozen=True, slots=True)
class GatewaysLost:
    """One gateway of so many."""

    at_s: float
    down_s: float
    one_of: int = 2
    first: int = 0

    def begin(self, fleet: Breakable) -> Callable[[], None]:
        """See Failure."""
        return fleet.lose_gateways(self.one_of, self.first)


@dataclass(frozen=True, slots=True)
class RegistryAway:
    """The registry, for all gateways."""

    at_s: float
    down_s: float

    def begin(self, fleet: Breakable) -> Callable[[], None]:
        """See Failure."""
        fleet.registry.is_away = True

        def end() -> None:
            fleet.registry.is_away = False

        return end
