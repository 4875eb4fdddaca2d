"""Packs and unpacks payloads on the device of a pool with two memories: see
engine.kv.tensors.grouped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from engine.kv.range import ALL, KvRange
from engine.kv.tensors.device_copy import PagedDeviceCopy, PayloadFormat, SharedMemory

#: Translates blocks to indices of a group's memory, see KvPool.ids_in.
IdsIn = Callable[[int, Sequence[int]], Sequence[int]]


class GroupedDeviceCopy:
    """See PagedDeviceCopy, for pieces of one group. Also raises ValueError for a block without a
    slot."""

    def __init__(
        self, copies: Mapping[int, PagedDeviceCopy], ids_in: IdsIn, block_size: int
    ) -> None:
        """copies: of each group's memory, by group number."""
        self._copies, self._ids_in, self._block_size = copies, ids_in, block_size
        self._any = next(iter(copies.values()))

    @property
    def memory(self) -> SharedMemory:
        return self._any.memory

    def fits(self, piece: KvRange, wire: PayloadFormat) -> bool:
        copy = self._copies.get(piece.group)
        return copy is not None and copy.fits(replace(piece, group=ALL), wire)

    def pack(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        wire: PayloadFormat,
        payload: torch.Tensor,
        seed: int,
    ) -> int:
        return self._copies[piece.group].pack(*self._in_copy(block_ids, piece), wire, payload, seed)

    def unpack(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        wire: PayloadFormat,
        payload: torch.Tensor,
        seed: int,
    ) -> int:
        copy = self._copies[piece.group]
        return copy.unpack(*self._in_copy(block_ids, piece), wire, payload, seed)

    def pack_to_host(
        self, block_ids: Sequence[int], piece: KvRange, wire: PayloadFormat, data: memoryview
    ) -> None:
        copy = self._copies[piece.group]
        copy.pack_to_host(*self._in_copy(block_ids, piece), wire, data)

    def unpack_from_host(
        self, block_ids: Sequence[int], piece: KvRange, wire: PayloadFormat, data: memoryview
    ) -> None:
        copy = self._copies[piece.group]
        copy.unpack_from_host(*self._in_copy(block_ids, piece), wire, data)

    def put(self, data: memoryview, payload: torch.Tensor, seed: int) -> int:
        return self._any.put(data, payload, seed)

    def take(self, payload: torch.Tensor, data: memoryview, seed: int) -> int:
        return self._any.take(payload, data, seed)

    def _in_copy(self, block_ids: Sequence[int], piece: KvRange) -> tuple[Sequence[int], KvRange]:
        """The blocks or slots of the piece's tokens, at the places of their blocks, because runs of
        a payload depend on the places of tokens; 0 in the place of earlier ones."""
        first = piece.first_token // self._block_size
        end = -(-piece.end_token // self._block_size)
        own = self._ids_in(piece.group, block_ids[first:end])
        return [*([0] * first), *own], replace(piece, group=ALL)


def grouped_copy(
    copies: Mapping[int, PagedDeviceCopy | None], ids_in: IdsIn, block_size: int
) -> GroupedDeviceCopy | None:
    """The copy of a pool with these memories, by group number; None if one of them has none."""
    found = {number: copy for number, copy in copies.items() if copy is not None}
    return GroupedDeviceCopy(found, ids_in, block_size) if len(found) == len(copies) else None
