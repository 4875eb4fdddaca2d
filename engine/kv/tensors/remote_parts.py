"""KV blocks with parts in the memory of other hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.types import KvLayout
from engine.kv.range import KvRange
from engine.kv.tensors.packed import ALL_HEADS, PackedPart, PackedPool
from engine.kv.tensors.paged import TorchKvPool
from engine.kv.tensors.state_memory import StateMemory

#: Copies blocks, or slots, at the other ranks: sources[i] to targets[i], before the next step.
CopyOthers = Callable[[Sequence[int], Sequence[int]], None]


class RemoteParts(PackedPool):
    """See engine.kv.interface.KvPool: rank 0's view. Only rank 0's part is in reach, so that blocks
    can be copied, by all ranks, and not packed. Marks are of rank 0's device."""

    can_pack = False

    def __init__(
        self,
        layout: KvLayout,
        own: TorchKvPool,
        copy_others: CopyOthers,
    ) -> None:
        """layout: of the whole model. own: rank 0's part, with its states."""
        super().__init__(layout, own.num_blocks, own.records)
        self.own, self._copy_others = own, copy_others
        self.tensor, self.scales = own.tensor, own.scales
        self.mark, self.follow, self.synchronize = own.mark, own.follow, own.synchronize
        """See KvPool."""

    def pack_parts(
        self,
        block_ids: Sequence[int],  # noqa: ARG002
        piece: KvRange,  # noqa: ARG002
        parts: Sequence[PackedPart],  # noqa: ARG002
        heads: slice = ALL_HEADS,  # noqa: ARG002
    ) -> None:
        """Not possible. Raises ValueError."""
        raise ValueError("the KV of a worker on several hosts is in no one memory")

    unpack_parts = pack_parts

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._copy_others(sources, targets)
        self.own.copy_rows(sources, targets)


class RemoteStates(StateMemory):
    """Rank 0's states; the other ranks have theirs in the same slots and places."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, num_slots: int, copy_others: CopyOthers
    ) -> None:
        """layout: of rank 0's part."""
        super().__init__(layout, num_blocks, num_slots)
        self._copy_others = copy_others

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._copy_others(sources, targets)
        super().copy_slots(sources, targets)
