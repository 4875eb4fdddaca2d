"""Interface of a kind of layer group: the tokens that it keeps KV of, and the allocator of its
slots if it lies apart from the blocks.

A kind is one file of this package and one entry of KINDS (engine/kv/groups/__init__.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

from baton.types import BlockCounts, KvLayout
from engine.kv.range import KvRange

#: More tokens than any sequence has.
LONG: Final = 1 << 62


@dataclass(slots=True)
class SlotTable:
    """By block id: the block's slot in [0, num_slots), or -1 if it has none.

    Changed by the group's allocator, in the engine's thread; its length is constant. is_shared: see
    `shared`.
    """

    num_slots: int
    of_block: array[int]
    is_shared: bool = False

    @classmethod
    def empty(cls, num_blocks: int, num_slots: int) -> SlotTable:
        """A table in which no block has a slot."""
        return cls(num_slots, array("q", [-1]) * num_blocks)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within the context each block has a slot, which it shares with others: for KV that nobody
        reads, before the allocator assigns any."""
        self.is_shared = True
        try:
            for block_id in range(len(self.of_block)):
                self.of_block[block_id] = block_id % self.num_slots
            yield
        finally:
            self.is_shared = False
            for block_id in range(len(self.of_block)):
                self.of_block[block_id] = -1


class LayerGroup(ABC):
    """Layers with the same KV retention.

    number: on the wire, see baton.v1.KvGroup; unique among KINDS, never ALL. is_paged: True for
    token rows in blocks; False for one record per sequence, the state after the last computed
    token, with the KvRange of that token. layers: ascending; record layers are numbered apart from
    paged ones. layer_bytes: bytes per layer, of a token or of a record.
    """

    number: ClassVar[int]
    is_paged: ClassVar[bool] = True
    cannot_rewind: ClassVar[str] = ""
    """Why a sequence cannot resume from an earlier token, for people; then it has no shared prefix,
    no drafts, and one step in flight. Empty if it can."""

    def __init__(self, layers: Sequence[int], layer_bytes: int) -> None:
        self.layers = layers
        self.layer_bytes = layer_bytes

    @classmethod
    @abstractmethod
    def of(cls, layout: KvLayout, rest: Sequence[int]) -> LayerGroup | None:
        """This kind's group of a layout; None if no layer is of this kind. rest: layers with token
        rows that previous kinds have left, ascending."""

    @classmethod
    def is_sound(cls, layout: KvLayout) -> bool:  # noqa: ARG003
        """Whether the fields of a peer's layout that describe this kind are consistent."""
        return True

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def keeps_all_tokens(self) -> bool:
        """Whether a sequence needs the KV of all its tokens in this group."""
        return self.kept_start(LONG) == 0

    @abstractmethod
    def kept_start(self, num_tokens: int) -> int:
        """First token with KV that the next token needs, after num_tokens tokens."""

    def arrived_from(
        self, starts: Sequence[int], ends: Sequence[int], first_token: int, end_token: int
    ) -> int | None:
        """The first arrived token of a run of layers, if exactly the KV needed to continue at
        end_token arrived; else None.

        starts, ends: arrived token intervals, disjoint, ascending. first_token: start of the
        missing range.
        """
        start = starts[0] if starts else end_token
        expected = ([], []) if start == end_token else ([start], [end_token])
        latest = max(first_token, self.kept_start(end_token))
        is_enough = (starts, ends) == expected and first_token <= start <= latest
        return start if is_enough else None

    def max_slots(
        self,
        max_num_seqs: int,  # noqa: ARG002
        max_num_batched_tokens: int,  # noqa: ARG002
        block_size: int,  # noqa: ARG002
    ) -> int:
        """Maximum slots that running sequences hold at once, if this group lies apart; 0 if it
        never does."""
        return 0

    def allocator(self, table: SlotTable) -> GroupAllocator:
        """The allocator of `table`. Raises ValueError if this group never lies apart."""
        del table
        raise ValueError(f"the KV of {type(self).__name__} lies in the blocks")


class WholeBlocks(Protocol):
    """The part of the prefix index that allocators use."""

    def is_whole(self, block_id: int) -> bool:
        """Whether the block is indexed with the KV of all groups."""
        ...

    def set_partial(self, block_id: int) -> None:
        """Mark the block, if indexed, as lacking the KV of a group."""
        ...


class GroupAllocator(ABC):
    """Slots for a group's KV apart from the blocks. A block has one slot or none.

    The pool calls it on each event of leases and blocks. `held`: indices in the lease's block table
    with slots, changed only by the allocator. The caller checks num_to_write first, so slots are
    available.
    """

    written_places: ClassVar[tuple[int, ...]] = ()
    """Block table indices that every step writes."""
    num_at_start: ClassVar[int] = 0
    """Slots that a new lease takes."""
    slides: ClassVar[bool] = False
    """Whether running sequences give back slots that they no longer need."""

    def __init__(self, table: SlotTable) -> None:
        """table: without slots."""
        self.num_slots, self.of_block = table.num_slots, table.of_block
        self._free = deque(range(self.num_slots))

    def bind(self, index: WholeBlocks) -> None:
        """Set the prefix index; called once, before any other method."""
        self._index = index

    @abstractmethod
    def counts(self) -> BlockCounts:
        """Slots by state, for load reports."""

    @property
    def num_available(self) -> int:
        """Slots available now."""
        return len(self._free)

    def take(self, block_id: int) -> None:
        """Assign an available slot to a block without one."""
        self.of_block[block_id] = self._free.popleft()

    def _free_slot(self, block_id: int) -> None:
        self._free.append(self.of_block[block_id])
        self.of_block[block_id] = -1

    @abstractmethod
    def begin(self, block_ids: Sequence[int], places: range) -> set[int]:
        """Start a lease with this group's KV already in its blocks at `places`. Returns `held`."""

    def num_to_write(
        self,
        held: set[int],  # noqa: ARG002
        places: range,  # noqa: ARG002
        copied: Sequence[int],  # noqa: ARG002
    ) -> int:
        """Maximum slots needed to write the blocks at `places`; those at `copied` are copied
        first."""
        return 0

    def on_copy(self, held: set[int], place: int, source: int, target: int) -> None:  # noqa: B027
        """The lease replaced block `source` at this index by its copy `target`."""

    def on_write(self, held: set[int], block_ids: Sequence[int], places: range) -> None:  # noqa: B027
        """The blocks at these indices are about to be written."""

    def fork(self, held: set[int], block_ids: Sequence[int]) -> set[int]:
        """A second lease holds these blocks. Returns its `held`."""
        del block_ids
        return set(held)

    def slide(self, held: set[int], block_ids: Sequence[int], first: int) -> None:  # noqa: B027
        """Indices before `first` are no longer needed."""

    def release(self, held: set[int], block_ids: Sequence[int]) -> None:  # noqa: B027
        """The lease ends; the pool gives back its blocks afterwards."""

    def on_freed(self, block_id: int) -> None:  # noqa: B027
        """No lease holds the block any more."""

    def on_evicted(self, block_id: int) -> None:  # noqa: B027
        """A cached block is about to be overwritten."""

    def check_integrity(
        self, leases: Iterable[tuple[Sequence[int], set[int]]], whole: set[int]
    ) -> None:
        """Raise AssertionError unless each slot is in exactly one state. leases: (block table,
        held) of each; whole: blocks indexed with the KV of all groups."""
        with_slot = {block_id for block_id, slot in enumerate(self.of_block) if slot >= 0}
        slots = [*(self.of_block[block_id] for block_id in with_slot), *self._free]
        raise_faults(
            {
                "a slot is in two states": len(set(slots)) != len(slots),
                "a slot is lost": len(slots) != self.num_slots,
                **self._faults(leases, whole, with_slot),
            }
        )

    @abstractmethod
    def _faults(
        self,
        leases: Iterable[tuple[Sequence[int], set[int]]],
        whole: set[int],
        with_slot: Set[int],
    ) -> dict[str, bool]:
        """Faults of this kind, and whether each is there. with_slot: blocks that have one."""


def raise_faults(faults: dict[str, bool]) -> None:
    """Raise AssertionError with the names of all true entries."""
    if found := [fault for fault, is_there in faults.items() if is_there]:
        raise AssertionError("; ".join(found))


def record_of(num_tokens: int, group: LayerGroup) -> KvRange:
    """The records of all layers of an unpaged group, after num_tokens >= 1 tokens."""
    return KvRange(num_tokens - 1, 1, 0, group.num_layers, group.number)
