"""Restricts which workers may share a sequence, by numerics class (how they round). Pure except for
one log line.

A fleet of one numerics class is deterministic. In a fleet of several, "mixed" logs a warning once:
workers may choose different tokens where two are nearly as likely. "strict" keeps each sequence
within one class: KV is sent only within a class, a sequence with tokens continues only on workers
of their class, and a worker without a peer of its class in the other tier is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from baton.errors import NUMERICS_FIX, PeerMismatch
from baton.types import NumericsClass, Tier

_log = logging.getLogger(__name__)

NumericsPolicy = Literal["mixed", "strict"]


@dataclass(frozen=True, slots=True)
class Rounding:
    """A joined worker and its numerics class."""

    worker_id: str
    tier: Tier
    numerics: NumericsClass


class NumericsWatch:
    """Numerics classes of one fleet, and the workers they keep apart."""

    def __init__(self, policy: NumericsPolicy) -> None:
        self.is_strict = policy == "strict"
        self._joined: dict[str, Rounding] = {}
        """By address."""
        self._members: dict[NumericsClass, set[str]] = {}
        """Addresses of the joined workers, by class."""
        self._strangers: dict[NumericsClass, frozenset[str]] = {}
        """The members of all other classes, by class, once asked for; empty after each change."""
        self._reported: frozenset[NumericsClass] = frozenset()

    @property
    def classes(self) -> frozenset[NumericsClass]:
        """Classes of the joined workers."""
        return frozenset(self._members)

    def put(self, address: str, rounding: Rounding) -> None:
        """A worker has joined, or changed its tier. Logs a mix of classes once, and again when a
        class is added."""
        self.drop(address)
        self._joined[address] = rounding
        self._members.setdefault(rounding.numerics, set()).add(address)
        if len(self._members) > 1 and not self._members.keys() <= self._reported:
            self._reported |= self.classes
            _log.warning("%s", self._describe_mix())

    def drop(self, address: str) -> None:
        """A worker has left; no-op if it had not joined."""
        self._strangers.clear()
        if (rounding := self._joined.pop(address, None)) is None:
            return
        members = self._members[rounding.numerics]
        members.remove(address)
        if not members:
            del self._members[rounding.numerics]

    def incompatible_with(self, address: str) -> Set[str]:
        """Addresses of workers that must not share a sequence with the one at `address`."""
        if not self.is_strict or len(self._members) < 2 or address not in self._joined:
            return frozenset()
        own = self._joined[address].numerics
        if own not in self._strangers:
            others = (members for numerics, members in self._members.items() if numerics != own)
            self._strangers[own] = frozenset().union(*others)
        return self._strangers[own]

    def refusal_of(self, address: str) -> PeerMismatch | None:
        """The error if no worker of the other tier has the class of the one at `address`; else
        None."""
        own, incompatible = self._joined.get(address), self.incompatible_with(address)
        if own is None or not incompatible:
            return None
        others = [a for a, rounding in self._joined.items() if rounding.tier is not own.tier]
        if not others or not incompatible >= set(others):
            return None
        difference = self._joined[min(others)].numerics.difference(own.numerics)
        if difference is None:
            return None
        return PeerMismatch.of(f"{own.worker_id} at {address}", *difference, fix=NUMERICS_FIX)

    def _describe_mix(self) -> str:
        members = "; ".join(
            f"{numerics}: " + ", ".join(sorted(self._joined[a].worker_id for a in addresses))
            for numerics, addresses in sorted(self._members.items(), key=lambda item: str(item[0]))
        )
        mix = f"the workers are of {len(self.classes)} numerics classes ({members})"
        if self.is_strict:
            return f"{mix}; with --numerics=strict each sequence stays within one of them"
        return (
            f"{mix}: tokens may differ where two are nearly as likely; level the CPUs with "
            "BATON_CPU_LEVEL, or give --numerics=strict"
        )
