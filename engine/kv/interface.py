"""An engine's KV memory, as schedulers and the KV channel see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from baton.types import KvLayout
from engine.kv.groups.group import SlotTable
from engine.kv.layout import LayerGroups
from engine.kv.range import ALL, KvRange


class CheckedCopy(Protocol):
    """Copies rows of blocks and computes their payload's xxh3_64 in one pass, see
    baton_kernels.cpu.checked_copy. The caller checks ranges.

    tokens, layers: (first, count), tokens counted from the first of block_ids. Both return the
    checksum.
    """

    @property
    def copies_rows(self) -> bool: ...

    @property
    def min_bytes(self) -> int: ...

    def gather(
        self,
        block_ids: Sequence[int],
        tokens: tuple[int, int],
        layers: tuple[int, int],
        packed: memoryview,
        seed: int,
    ) -> int: ...

    def scatter(
        self,
        block_ids: Sequence[int],
        tokens: tuple[int, int],
        layers: tuple[int, int],
        packed: memoryview,
        seed: int,
    ) -> int: ...


class BlockMemory(Protocol):
    """Memory with the layers of each block side by side."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def has_block_views(self) -> bool:
        """Whether each block is one contiguous range of host memory."""
        ...

    def block_view(self, block_id: int, first_layer: int, num_layers: int) -> memoryview:
        """The bytes of some layers of a block. A writer must own the block. Raises ValueError for a
        wrong range, or if there are no block views."""
        ...

    @property
    def checked_copy(self) -> CheckedCopy | None:
        """None if this machine or memory does not support it."""
        ...


class KvPool(Protocol):
    """An engine's KV blocks. All methods may be called from transfer threads.

    slot_tables: slots by block id, for each group with KV apart from the blocks, keyed by group
    number. The block pool's allocators assign the slots. Access to such a group in a block without
    a slot raises ValueError.
    """

    @property
    def layout(self) -> KvLayout: ...

    @property
    def groups(self) -> LayerGroups: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def slot_tables(self) -> Mapping[int, SlotTable]: ...

    @property
    def can_pack(self) -> bool:
        """Whether the KV of all layers and heads is in reach, so that it can be packed here."""
        ...

    def pack(self, block_ids: Sequence[int], piece: KvRange, out: memoryview) -> None:
        """Copy the range `piece` of the sequence with block table `block_ids` into `out`.

        out: [piece.num_layers, parts, num_kv_heads, piece.num_tokens, head_dim] in the layout's
        dtype, of exactly that size; for SCALED_DTYPES each head's codes are followed by its scales,
        [piece.num_tokens] float32. For a group with records: [piece.num_layers, layer_bytes];
        block_ids may then be a prefix of the sequence's. Raises ValueError if the piece is outside
        the blocks or layers, or `out` has another size.
        """
        ...

    def unpack(self, block_ids: Sequence[int], piece: KvRange, data: memoryview) -> None:
        """Inverse of pack: write `data` into the blocks. Raises as pack does, before any write."""
        ...

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks, sources[i] to targets[i], and their slots where both have one; no
        target may be a source."""
        ...

    def mark(self) -> object:
        """A mark after all work that the engine has started; None if that has completed. Called in
        the engine's thread when blocks pass to a transfer: work started later does not touch
        them."""
        ...

    def follow(self, mark: object) -> None:
        """Order the calling thread's later packs and unpacks after a mark. None: no order."""
        ...

    def synchronize(self) -> None:
        """Wait for the calling thread's copies. Raises RuntimeError if the device has failed
        permanently."""
        ...

    # Optional fast paths

    def memory_of(self, group: int) -> BlockMemory | None:
        """Memory that holds the layers of a group, or ALL, side by side; None if there is none."""
        ...

    def ids_in(self, group: int, block_ids: Sequence[int]) -> Sequence[int]:
        """Translate block ids to indices of memory_of(group). Raises ValueError for a block without
        memory there."""
        ...


class HostOrdered:
    """The ordering half of a KvPool in host memory: engine calls are synchronous, so nothing
    waits."""

    def mark(self) -> object:
        return None

    def follow(self, mark: object) -> None:
        """See KvPool."""

    def synchronize(self) -> None:
        """See KvPool."""


@contextmanager
def shared_slots(pool: KvPool) -> Iterator[None]:
    """Within the context each block has slots, see SlotTable.shared."""
    with ExitStack() as stack:
        for table in pool.slot_tables.values():
            stack.enter_context(table.shared())
        yield


def kept_parts(pool: KvPool, piece: KvRange, whole_start: int) -> Iterator[KvRange]:
    """The parts of `piece` to keep or send, each within one memory of the pool. whole_start: see
    LayerGroups.kept."""
    return pool.groups.kept(piece, whole_start, by_group=pool.memory_of(ALL) is None)
