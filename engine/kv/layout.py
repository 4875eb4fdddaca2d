"""The layer groups of a layout: layers with the same KV retention, and the ranges of a sequence's
KV that are kept, sent and held. Only engine/kv distinguishes kinds of layers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

from baton.types import DTYPE_BYTES, KvLayout
from engine.kv import groups as kinds
from engine.kv.groups.group import LONG, GroupAllocator, LayerGroup, SlotTable, record_of
from engine.kv.range import ALL, KvRange


class LayerGroups:
    """All groups of one layout, in order of their numbers, which is the order of sending."""

    def __init__(self, layout: KvLayout, groups: Sequence[LayerGroup]) -> None:
        self.layout = layout
        self.all = tuple(groups)
        self.paged = tuple(group for group in groups if group.is_paged)
        self.records = tuple(group for group in groups if not group.is_paged)
        self._by_number = {group.number: group for group in groups}
        self._partial = tuple(group for group in self.paged if not group.keeps_all_tokens)
        self._group_of_layer: dict[int, LayerGroup] = {
            layer: group for group in self.paged for layer in group.layers
        }
        self.has_partial = bool(self._partial)
        """Whether some paged group keeps fewer than all tokens."""
        self.keeps_all_blocks = len(self._partial) < len(self.paged) or not self.paged
        """Whether a sequence holds the blocks of all its tokens while it runs."""
        self.cannot_rewind = next(filter(None, (group.cannot_rewind for group in groups)), "")
        """See LayerGroup; the first group's reason, if any."""

    def __getitem__(self, number: int) -> LayerGroup:
        """The group with this number. Raises KeyError if there is none."""
        return self._by_number[number]

    def __contains__(self, number: int) -> bool:
        """Whether a KvRange may have this group number; ALL means all paged groups."""
        return number == ALL or number in self._by_number

    def is_paged(self, piece: KvRange) -> bool:
        """Whether a piece consists of token rows in blocks."""
        return piece.group == ALL or self._by_number[piece.group].is_paged

    # Sizes

    def num_layers(self, number: int) -> int:
        """Layers of a group; 0 if the layout does not have the group."""
        if number == ALL:
            return self.layout.num_layers
        group = self._by_number.get(number)
        return group.num_layers if group else 0

    def layers(self, number: int) -> Sequence[int]:
        """A group's layers, ascending; a KvRange of the group numbers them from 0."""
        return range(self.layout.num_layers) if number == ALL else self._by_number[number].layers

    def num_bytes(self, piece: KvRange) -> int:
        """Bytes of a piece in a pool."""
        if piece.group == ALL:
            return piece.num_bytes(self.layout.token_layer_bytes)
        return piece.num_bytes(self._by_number[piece.group].layer_bytes)

    @property
    def record_bytes(self) -> int:
        """Bytes of all records of one sequence."""
        return sum(group.num_layers * group.layer_bytes for group in self.records)

    @property
    def apart_block_bytes(self) -> int:
        """Bytes of a block's rows in groups that keep fewer than all tokens."""
        rows = sum(group.num_layers * group.layer_bytes for group in self._partial)
        return rows * self.layout.block_size

    def layout_of(self, number: int) -> KvLayout:
        """The layout of a paged group alone: its layers renumbered from 0, no windows."""
        num_layers = self.num_layers(number)
        return replace(self.layout, num_layers=num_layers, window=0, windowed_layers=())

    # Retention

    def kept_start(self, num_tokens: int) -> int:
        """First token with KV that the next token needs in any group, after num_tokens tokens.
        Earlier tokens are needed only in groups that keep all."""
        starts = (group.kept_start(num_tokens) for group in self._partial)
        return min(starts, default=0)

    def whole_start(self, num_tokens: int) -> int:
        """First token with KV that is sent in all groups for a sequence of num_tokens tokens; a
        multiple of the block size. Enough to continue the sequence, and to reuse its full blocks as
        a prefix."""
        size = self.layout.block_size
        return self.kept_start(num_tokens // size * size) // size * size

    def held_start(self, num_tokens: int) -> int:
        """First token with a block that a sequence holds after num_tokens tokens are computed."""
        return 0 if self.keeps_all_blocks else self.whole_start(num_tokens)

    def num_held_blocks(self, num_tokens: int) -> int:
        """Blocks held by a sequence of num_tokens tokens with all but the last computed."""
        first = self.held_start(max(0, num_tokens - 1)) // self.layout.block_size
        return self.layout.num_blocks_for(num_tokens) - first

    @property
    def reach_tokens(self) -> int:
        """Maximum tokens that a new token attends to, including itself, in groups that keep fewer
        than all."""
        return LONG - self.kept_start(LONG) + 1

    @property
    def kept_and_apart(self) -> tuple[LayerGroup, LayerGroup]:
        """The group in the blocks, and the one in slots, of a layout with two paged groups."""
        apart, kept = sorted(self.paged, key=lambda group: group.keeps_all_tokens)
        return kept, apart

    # Pieces

    def split(self, piece: KvRange) -> Iterator[KvRange]:
        """Split a piece by group. A piece of one group, or of a layout that keeps all tokens, is
        not split."""
        if piece.group != ALL or (len(self.paged) == 1 and not self._partial):
            yield piece
            return
        for group in self.paged:
            first, end = (
                bisect_left(group.layers, at) for at in (piece.first_layer, piece.end_layer)
            )
            if first < end:
                yield replace(piece, first_layer=first, num_layers=end - first, group=group.number)

    def runs(self, piece: KvRange) -> Iterator[tuple[KvRange, KvRange]]:
        """Split a piece of paged groups into runs of adjacent layers of one group, in order: (range
        in all layers, range in the group) each."""
        layers = self.layers(piece.group)[piece.first_layer : piece.end_layer]
        of_layer = self._group_of_layer
        for (number, _), found in groupby(
            enumerate(layers), lambda at: (of_layer[at[1]].number, at[1] - at[0])
        ):
            own = [layer for _, layer in found]
            run = replace(piece, first_layer=own[0], num_layers=len(own), group=ALL)
            at = bisect_left(self._by_number[number].layers, own[0])
            yield run, replace(run, first_layer=at, group=number)

    def kept(
        self, piece: KvRange, whole_start: int, *, by_group: bool = False
    ) -> Iterator[KvRange]:
        """`piece` (of ALL or a record group) without tokens before whole_start in groups that keep
        fewer than all. by_group: split by group; default: in runs of layers, and only where
        necessary."""
        if by_group:
            parts = [(part, part.group) for part in self.split(piece)]
        elif not self._partial or not self.is_paged(piece) or whole_start <= piece.first_token:
            parts = [(piece, ALL)]
        else:
            parts = [(run, own.group) for run, own in self.runs(piece)]
        partial = {group.number for group in self._partial}
        for part, number in parts:
            start = max(piece.first_token, whole_start if number in partial else 0)
            if start < piece.end_token:
                yield replace(part, first_token=start, num_tokens=piece.end_token - start)

    def records_after(self, num_tokens: int) -> tuple[KvRange, ...]:
        """All records of a sequence after num_tokens >= 1 computed tokens."""
        return tuple(record_of(num_tokens, group) for group in self.records)

    # Slots

    def max_slots(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Maximum slots of running sequences, see LayerGroup.max_slots, if groups that keep fewer
        than all tokens lie apart. 0 if no group, or every group, keeps fewer: blocks themselves are
        then given back."""
        if not self.keeps_all_blocks:
            return 0
        size = self.layout.block_size
        slots = (g.max_slots(max_num_seqs, max_num_batched_tokens, size) for g in self._partial)
        return max(slots, default=0)

    def allocators(self, tables: Mapping[int, SlotTable]) -> tuple[GroupAllocator, ...]:
        """Allocators of the slots in an engine's pool, in order of group number."""
        return tuple(self._by_number[number].allocator(table) for number, table in tables.items())


def whole_blocks(block_size: int) -> LayerGroups:
    """Groups of a pool that keeps all tokens in blocks of block_size, such as that of a draft
    model."""
    return groups_of(KvLayout("", 1, 1, 1, "int8", block_size))


@lru_cache(maxsize=256)
def groups_of(layout: KvLayout) -> LayerGroups:
    """The groups of a layout."""
    rest, found = list(range(layout.num_layers)), []
    for kind in kinds.KINDS:
        if group := kind.of(layout, tuple(rest)):
            found.append(group)
            if group.is_paged:
                rest = [layer for layer in rest if layer not in group.layers]
    return LayerGroups(layout, sorted(found, key=lambda group: group.number))


def is_sound(layout: KvLayout) -> bool:
    """Whether a peer's layout is valid: sizes are positive and fields consistent."""
    sizes = layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size
    return (
        layout.dtype in DTYPE_BYTES
        and min(sizes) > 0
        and all(kind.is_sound(layout) for kind in kinds.KINDS)
    )
