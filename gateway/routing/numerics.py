"""Restricts which workers may share a sequence, by numerics class (how they round). Pure except for
one log line.

A fleet of one numerics class is deterministic. In a fleet of several, "mixed" logs a warning once:
workers may choose different tokens where two are nearly as likely. "strict" keeps each sequence
within one class: KV is sent only within a class, a sequence with tokens continues only on workers
of their class, and a worker without a peer of its class in the other tier is refused.
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
    """A joined worker and its numerics class."""

    worker_id: str
    tier: Tier
    numerics: NumericsClass


class NumericsWatch:
    """Numerics classes of one fleet, and the workers they keep apart."""

    def __init__(self, policy: NumericsPolicy) -> None:
        self.is_strict = policy == "strict"
        self._joined: Mapping[str, Rounding] = {}
        self._incompatible: Mapping[str, frozenset[str]] = {}
        self._reported: frozenset[NumericsClass] = frozenset()

    @property
    def classes(self) -> frozenset[NumericsClass]:
        """Classes of the joined workers."""
        return frozenset(rounding.numerics for rounding in self._joined.values())

    def update(self, joined: Mapping[str, Rounding]) -> None:
        """Replace the joined workers, by address. Logs a mix of classes once, and again when a
        class is added."""
        self._joined = dict(joined)
        classes = self.classes
        self._incompatible = self._find() if self.is_strict and len(classes) > 1 else {}
        if len(classes) > 1 and not classes <= self._reported:
            self._reported |= classes
            _log.warning("%s", self._describe_mix())

    def incompatible_with(self, address: str) -> Set[str]:
        """Addresses of workers that must not share a sequence with the one at `address`."""
        return self._incompatible.get(address, frozenset())

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

    def _find(self) -> dict[str, frozenset[str]]:
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
