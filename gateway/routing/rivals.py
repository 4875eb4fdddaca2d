"""Fairness between accounts across gateways: each gateway tells the others what it gave to which
account, and which accounts wait there.

Without it, an account that comes by a gateway of its own is alone in that queue, and gets as much
of the fleet as all others together. With it, the queues count as one: what others gave to an
account is charged here, too, and an account waits while one that waits elsewhere has had less for
its weight.

Notes may be late or lost, and an account that waits elsewhere may find no room there. So an account
is held up for moments only: a place that nobody takes for HOLD_S goes to it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.registry.board import Board

_log = logging.getLogger(__name__)

#: Seconds between two notes.
PERIOD_S = 0.5
#: Maximum accounts in a note: those that wait, then those that were given most.
MAX_ACCOUNTS = 256
#: Maximum units: up to here, a float counts by ones.
_MAX_UNITS = 2.0**53
#: Seconds for which a free place is left to accounts that wait elsewhere.
HOLD_S = 0.01


@dataclass(frozen=True, slots=True)
class Share:
    """An account at one gateway. given: units (places by weight) that this gateway has given it
    since its start. counter: its virtual counter there. is_waiting: whether it waits there."""

    given: float
    counter: float
    is_waiting: bool


@dataclass(frozen=True, slots=True)
class Shares:
    """Accounts of one gateway. floor: counter of the one served last."""

    floor: float
    accounts: Mapping[bytes, Share]

    def to_note(self) -> str:
        def weight(item: tuple[bytes, Share]) -> tuple[bool, float]:
            return item[1].is_waiting, item[1].given

        most = sorted(self.accounts.items(), key=weight, reverse=True)
        accounts = {
            account.hex(): [share.given, share.counter, int(share.is_waiting)]
            for account, share in most[:MAX_ACCOUNTS]
        }
        return json.dumps({"floor": self.floor, "accounts": accounts})

    @classmethod
    def from_note(cls, note: str) -> Shares:
        """Raises ValueError for what is no note."""
        try:
            read: Any = json.loads(note)
            if (number := len(read["accounts"])) > MAX_ACCOUNTS:
                raise ValueError(f"no note of a gateway: {number} accounts, not {MAX_ACCOUNTS}")
            accounts = {
                bytes.fromhex(name): Share(_units(given), _units(counter), bool(is_waiting))
                for name, (given, counter, is_waiting) in read["accounts"].items()
            }
            return cls(_units(read["floor"]), accounts)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"no note of a gateway: {error!r}") from error


def _units(value: Any) -> float:
    if not 0 <= value <= _MAX_UNITS:  # nor NaN; an integer may be too large for a float
        raise ValueError(f"no note of a gateway: {value!r:.40} units")
    return float(value)


class Rivals:
    """What other gateways told last. Pure."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, bytes], float] = {}

    def update(
        self, others: Mapping[str, Shares]
    ) -> tuple[Mapping[bytes, float], Mapping[bytes, float]]:
        """Return (units given elsewhere since the last call, counters of accounts that wait
        elsewhere), by account."""
        charges: dict[bytes, float] = {}
        waiting: dict[bytes, float] = {}
        given = {}
        for gateway, shares in others.items():
            for account, share in shares.accounts.items():
                key = gateway, account
                given[key] = share.given
                # What was given before this gateway heard of the other is in its counter.
                delta = share.given - self._given.get(key, share.given)
                charges[account] = charges.get(account, 0.0) + max(0.0, delta)
                if share.is_waiting:
                    waiting[account] = max(share.counter, waiting.get(account, 0.0))
        self._given = given
        return charges, waiting


async def share_counters(
    shares: Callable[[], Shares], take: Callable[[Mapping[str, Shares]], None], board: Board
) -> None:
    """Exchange notes until cancelled. shares: of this gateway. take: is called with those of
    others, after each exchange."""
    refused: set[str] = set()
    try:
        while True:
            others = {}
            for gateway, note in (await board.exchange(shares().to_note())).items():
                try:
                    others[gateway] = Shares.from_note(note)
                except ValueError as error:
                    if gateway not in refused:
                        _log.warning("gateway %s: %s", gateway, error)
                    refused.add(gateway)
            take(others)
            await asyncio.sleep(PERIOD_S)
    finally:
        await board.close()
