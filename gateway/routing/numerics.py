"""Which workers may work on one sequence, by how they round. Pure but for one line in the log.

A fleet of one numerics class gives one answer to one request. Where it has several, "mixed" goes on
and says so once: tokens may differ where two are nearly as likely. "strict" keeps every sequence
within one class, from its first worker to its last: KV never goes from a worker of one class to one
of another, a sequence that has tokens goes on with workers of their class only, and a worker that
no worker of the other tier can work with is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Literal

from baton.errors import NUMERICS_FIX, PeerMismatch
from baton.types import NumericsClass, Tier

_log = logging.getLogger(__name__)

NumericsPolicy = Literal["mixed", "strict"]


@dataclass(frozen=True, slots=True)
class Rounding:
    """A worker that has joined, and how it rounds."""

    worker_id: str
    tier: Tier
    numerics: NumericsClass


class NumericsWatch:
    """Of one fleet."""

    def __init__(self, policy: NumericsPolicy) -> None:
        self.is_strict = policy == "strict"
        self._joined: Mapping[str, Rounding] = {}
        self._strangers: Mapping[str, frozenset[str]] = {}
        self._reported: frozenset[NumericsClass] = frozenset()

    @property
    def classes(self) -> frozenset[NumericsClass]:
        """Of the workers that have joined."""
        return frozenset(rounding.numerics for rounding in self._joined.values())

    def update(self, joined: Mapping[str, Rounding]) -> None:
        """Take who has joined, by address. Logs a mix of classes once, and again when another class
        joins it."""
        self._joined = dict(joined)
        classes = self.classes
        self._strangers = self._find_strangers() if self.is_strict and len(classes) > 1 else {}
        if len(classes) > 1 and not classes <= self._reported:
            self._reported |= classes
            _log.warning("%s", self._describe_mix())

    def strangers_of(self, address: str) -> Set[str]:
        """Addresses of workers that may share no sequence with the one at `address`."""
        return self._strangers.get(address, frozenset())

    def refusal_of(self, address: str) -> PeerMismatch | None:
        """Why the worker at `address` gets no work: those of the other tier are all of other
        classes."""
        own, strangers = self._joined.get(address), self.strangers_of(address)
        if own is None or not strangers:
            return None
        others = [a for a, rounding in self._joined.items() if rounding.tier is not own.tier]
        if not others or not strangers >= set(others):
            return None
        difference = self._joined[min(others)].numerics.difference(own.numerics)
        if difference is None:
            return None
        return PeerMismatch.of(f"{own.worker_id} at {address}", *difference, fix=NUMERICS_FIX)

    def _find_strangers(self) -> dict[str, frozenset[str]]:
        by_class = {
            numerics: frozenset(a for a, r in self._joined.items() if r.numerics != numerics)
            for numerics in self.classes
        }
        return {address: by_class[r.numerics] for address, r in self._joined.items()}

    def _describe_mix(self) -> str:
        members = "; ".join(
            f"{numerics}: "
            + ", ".join(
                sorted(r.worker_id for r in self._joined.values() if r.numerics == numerics)
            )
            for numerics in sorted(self.classes, key=str)
        )
        mix = f"the workers are of {len(self.classes)} numerics classes ({members})"
        if self.is_strict:
            return f"{mix}; with --numerics=strict each sequence stays within one of them"
        return (
            f"{mix}: tokens may differ where two are nearly as likely; level the CPUs with "
            "BATON_CPU_LEVEL, or give --numerics=strict"
        )
