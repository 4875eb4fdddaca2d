"""Which running sequences should change decode workers to even out memory. Pure: snapshots in,
transfers out.

A worker is short when few of its blocks can be had; then its worst-ranked sequences go, those that
it would preempt first, until it has some room again. They go where plenty is left even with them.
The three levels are apart, so that what was moved is not moved back: a target stays above the level
at which moving ends, which is above that at which it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.types import Rank

#: Shares of a worker's blocks that can be had: below the first it is short, up to the second
#: sequences leave it, and the third is left where they go.
SHORT, RELIEVED, PLENTY = 0.1, 0.2, 0.4


@dataclass(frozen=True, slots=True)
class Memory:
    """A decode worker's blocks. num_places: further sequences that it runs. num_available_blocks:
    free or cached ones, less those on their way to be taken."""

    address: str
    block_size: int
    num_blocks: int
    num_available_blocks: int
    num_places: int

    @property
    def is_short(self) -> bool:
        return self.num_available_blocks < SHORT * self.num_blocks


@dataclass(frozen=True, slots=True)
class Running:
    """A running sequence that may be moved, and where it is. key: its number among them."""

    key: int
    address: str
    rank: Rank
    num_tokens: int

    def num_blocks_at(self, memory: Memory) -> int:
        """Blocks that it takes there, with room for the next token."""
        return -(-(self.num_tokens + 1) // memory.block_size)


@dataclass(frozen=True, slots=True)
class Transfer:
    """The sequence `key` goes to `address`."""

    key: int
    address: str


def rebalance(
    memories: Sequence[Memory], sequences: Sequence[Running], max_transfers: int
) -> list[Transfer]:
    """At most `max_transfers`, worst-ranked sequences first."""
    available = {m.address: m.num_available_blocks for m in memories}
    places = {m.address: m.num_places for m in memories}
    by_address = {m.address: m for m in memories}
    short = {m.address for m in memories if m.is_short}
    transfers: list[Transfer] = []
    for sequence in sorted(sequences, key=lambda s: s.rank, reverse=True):
        if len(transfers) == max_transfers:
            break
        home = by_address.get(sequence.address)
        if home is None or home.address not in short:
            continue
        if available[home.address] >= RELIEVED * home.num_blocks:
            continue
        others = [m for m in memories if m.address not in short and places[m.address] > 0]
        target = _roomiest(sequence, others, available)
        if target is None:
            continue
        available[target.address] -= sequence.num_blocks_at(target)
        available[home.address] += sequence.num_blocks_at(home)
        places[target.address] -= 1
        transfers.append(Transfer(sequence.key, target.address))
    return transfers


def _roomiest(
    sequence: Running, memories: Sequence[Memory], available: dict[str, int]
) -> Memory | None:
    """The worker with the largest share of its blocks left, if plenty is left there with the
    sequence."""

    def share_left(memory: Memory) -> float:
        return (available[memory.address] - sequence.num_blocks_at(memory)) / memory.num_blocks

    best = max(memories, key=lambda m: (share_left(m), m.address), default=None)
    return best if best is not None and share_left(best) >= PLENTY else None
