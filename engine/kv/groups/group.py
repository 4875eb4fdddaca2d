"""What a kind of layer group defines: which tokens' KV it keeps, and who owns its memory where that
lies apart from the blocks.

A kind is one file of this package and one entry of KINDS (engine/kv/groups/__init__.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from baton.types import BlockCounts, KvLayout
from engine.kv.range import KvRange


@dataclass(frozen=True, slots=True)
class SlotTable:
    """By block id, the block's slot in [0, num_slots), or -1 if it has none.

    The group's allocator changes it, in the engine's thread; its length is constant.
    """

    num_slots: int
    of_block: array[int]

    @classmethod
    def empty(cls, num_blocks: int, num_slots: int) -> SlotTable:
        """Blocks without slots."""
        return cls(num_slots, array("q", [-1]) * num_blocks)


class LayerGroup(ABC):
    """Layers that keep KV by one rule.

    number: on the wire, see baton.v1.KvGroup; unique among KINDS, and not ALL.
    is_paged: it keeps a row for each token, in blocks; else one record for each sequence, as it is
    after the last token computed. A record's KvRange is of that one token.
    layers: ascending. Layers with records are counted apart from those with rows.
    layer_bytes: of a token in one layer; of a record in one layer.
    """

    number: ClassVar[int]
    is_paged: ClassVar[bool] = True
    cannot_rewind: ClassVar[str] = ""
    """Why a sequence cannot go on from an earlier token, for people: it has then no shared prefix,
    no drafts, and one step in flight. Empty if it can."""

    def __init__(self, layers: Sequence[int], layer_bytes: int) -> None:
        self.layers = layers
        self.layer_bytes = layer_bytes

    @classmethod
    @abstractmethod
    def of(cls, layout: KvLayout, rest: Sequence[int]) -> LayerGroup | None:
        """This kind's group of a layout; None if no layer is of this kind. rest: layers with rows
        of tokens that no kind before this one has taken, ascending."""

    @classmethod
    def is_sound(cls, layout: KvLayout) -> bool:  # noqa: ARG003
        """Whether the fields of a peer's layout that describe this kind agree with each other."""
        return True

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def keeps_all_tokens(self) -> bool:
        """Whether a sequence needs the KV of all its tokens in this group."""
        return self.kept_start(1 << 62) == 0

    @abstractmethod
    def kept_start(self, num_tokens: int) -> int:
        """The first token whose KV the next token needs, after num_tokens tokens."""

    def arrived_from(
        self, starts: Sequence[int], ends: Sequence[int], first_token: int, end_token: int
    ) -> int | None:
        """The first token that has arrived of a run of layers, if what has arrived lets a sequence
        of end_token tokens go on, and is nothing else; else None.

        starts, ends: token intervals that have arrived, disjoint, ascending. first_token: where
        what was missing begins.
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
        """Most slots that running sequences hold at once, if this group lies apart; 0 if it never
        does."""
        return 0

    def allocator(self, table: SlotTable) -> GroupAllocator:
        """Who owns the slots of `table`. Raises ValueError if this group never lies apart."""
        del table
        raise ValueError(f"the KV of {type(self).__name__} lies in the blocks")


class WholeBlocks(Protocol):
    """What an allocator asks of the prefix index."""

    def is_whole(self, block_id: int) -> bool:
        """Whether others can find the block with the KV of all groups."""
        ...

    def set_partial(self, block_id: int) -> None:
        """The block, if it is indexed, has lost the KV of a group."""
        ...


class GroupAllocator(ABC):
    """Slots for what a group keeps apart from the blocks. A block has one slot or none.

    The pool calls it with what happens to leases and blocks; `held` is the set of places in the
    lease's block table that it holds slots at, and the allocator's to change. Places of a call are
    such that slots are available, as num_to_write says beforehand.
    """

    written_places: ClassVar[tuple[int, ...]] = ()
    """Places in a block table that every step writes."""
    num_at_start: ClassVar[int] = 0
    """Slots that a new lease takes."""
    slides: ClassVar[bool] = False
    """Whether a running sequence gives slots back that it no longer needs."""

    def __init__(self, table: SlotTable) -> None:
        self.num_slots, self.of_block = table.num_slots, table.of_block

    def bind(self, index: WholeBlocks) -> None:
        """Called once, before anything else."""
        self._index = index

    @abstractmethod
    def counts(self) -> BlockCounts:
        """Slots by state, for load reports."""

    @property
    @abstractmethod
    def num_available(self) -> int:
        """Slots that can be had now."""

    @abstractmethod
    def begin(self, block_ids: Sequence[int], places: range) -> set[int]:
        """A new lease; its blocks at `places` hold this group's KV already. Returns `held`."""

    def num_to_write(
        self,
        held: set[int],  # noqa: ARG002
        places: range,  # noqa: ARG002
        copied: Sequence[int],  # noqa: ARG002
    ) -> int:
        """Slots that writing the blocks at `places` may take, those at `copied` after a copy."""
        return 0

    def on_copy(self, held: set[int], place: int, source: int, target: int) -> None:  # noqa: B027
        """The lease goes on in block `target`, a copy of `source`, at this place."""

    def on_write(self, held: set[int], block_ids: Sequence[int], places: range) -> None:  # noqa: B027
        """The blocks at these places are about to be written."""

    def fork(self, held: set[int], block_ids: Sequence[int]) -> set[int]:
        """Another lease holds these blocks, too. Returns its `held`."""
        del block_ids
        return set(held)

    def slide(self, held: set[int], block_ids: Sequence[int], first: int) -> None:  # noqa: B027
        """Places before `first` are no longer needed."""

    def release(self, held: set[int], block_ids: Sequence[int]) -> None:  # noqa: B027
        """The lease ends; its blocks are given back afterwards."""

    def on_freed(self, block_id: int) -> None:  # noqa: B027
        """No lease holds the block any more."""

    def on_evicted(self, block_id: int) -> None:  # noqa: B027
        """A cached block is about to hold something else."""

    @abstractmethod
    def check_integrity(
        self, leases: Iterable[tuple[Sequence[int], set[int]]], whole: set[int]
    ) -> None:
        """Raises AssertionError unless each slot is in one state. leases: (block table, held) of
        each; whole: blocks that are indexed with the KV of all groups."""


def raise_faults(faults: dict[str, bool]) -> None:
    """Raises AssertionError that names those that are true."""
    if found := [fault for fault, is_there in faults.items() if is_there]:
        raise AssertionError("; ".join(found))


def record_of(num_tokens: int, group: LayerGroup) -> KvRange:
    """The records of all layers of a group that is not paged, after num_tokens >= 1 tokens."""
    return KvRange(num_tokens - 1, 1, 0, group.num_layers, group.number)
