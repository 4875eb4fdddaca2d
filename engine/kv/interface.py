"""An engine's KV memory, as schedulers and the KV channel see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from baton.types import KvLayout
from engine.kv.groups.group import SlotTable
from engine.kv.layout import LayerGroups
from engine.kv.range import KvRange


class CheckedCopy(Protocol):
    """Copies rows of blocks and computes their payload's xxh3_64 in one pass, see
    baton_kernels.cpu.checked_copy. Ranges are the caller's to check.

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
    """Memory in which layers lie side by side, block by block."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def has_block_views(self) -> bool:
        """Whether blocks lie in host memory, each in one piece."""
        ...

    def block_view(self, block_id: int, first_layer: int, num_layers: int) -> memoryview:
        """The bytes of a whole block's layers; whoever writes there must own the block. Raises
        ValueError for a wrong range, or if there are no block views."""
        ...

    @property
    def checked_copy(self) -> CheckedCopy | None:
        """None where blocks cannot be copied so, on this machine."""
        ...


class KvPool(Protocol):
    """An engine's KV blocks. All methods may be called from transfer threads.

    slot_tables: by group number, of groups whose KV lies apart from the blocks: the slots that the
    block pool's allocators hand out. A piece of such a group in a block without a slot raises
    ValueError.
    """

    @property
    def layout(self) -> KvLayout: ...

    @property
    def groups(self) -> LayerGroups: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def slot_tables(self) -> Mapping[int, SlotTable]: ...

    def pack(self, block_ids: Sequence[int], piece: KvRange, out: memoryview) -> None:
        """Copy this part of the sequence with the block table `block_ids` into `out`.

        out: [piece.num_layers, parts, num_kv_heads, piece.num_tokens, head_dim] of the layout's
        dtype, exactly that many bytes; for SCALED_DTYPES each head's scales, [piece.num_tokens]
        float32, follow its codes. Of a group with records: [piece.num_layers, layer_bytes], and
        block_ids are all of the sequence's, or the first ones. Raises ValueError if the piece is
        not within the blocks or the layers, or `out` has another size.
        """
        ...

    def unpack(self, block_ids: Sequence[int], piece: KvRange, data: memoryview) -> None:
        """The inverse of pack: write `data` into the blocks. Raises as pack does, and then writes
        nothing."""
        ...

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks, sources[i] to targets[i], and their slots where both have one; no
        target is among the sources."""
        ...

    def mark(self) -> object:
        """What the engine has started by now; None: it is done already. Called in the engine's
        thread, when blocks become a transfer's to read or to write: nothing that is started later
        is in its way."""
        ...

    def follow(self, mark: object) -> None:
        """What the calling thread packs and unpacks from now on comes after a mark. None: after
        nothing."""
        ...

    def synchronize(self) -> None:
        """Wait until the calling thread's copies are over. Raises RuntimeError if the device has
        failed for good, whatever failed before this call."""
        ...

    # Faster ways, where the memory allows them

    def memory_of(self, group: int) -> BlockMemory | None:
        """Where the layers of a group, or ALL, lie side by side; None if they do not."""
        ...

    def ids_in(self, group: int, block_ids: Sequence[int]) -> Sequence[int]:
        """What these blocks are in memory_of(group). Raises ValueError where a block has nothing
        there."""
        ...


class HostOrdered:
    """The half of a KvPool in host memory that orders nothing: what the engine has called has
    happened."""

    def mark(self) -> object:
        """See KvPool."""
        return None

    def follow(self, mark: object) -> None:
        """See KvPool."""

    def synchronize(self) -> None:
        """See KvPool."""
