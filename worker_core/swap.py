"""Host memory for the KV of sequences that wait for blocks, and the thread that copies it there and
back. A sequence comes here when it is preempted, or when its KV arrives before its blocks.

The engine loop's thread submits copies and gets a SwapDone for each as a command. Until then the
sequence holds its blocks and does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from engine.kv.interface import KvPool, kept_parts
from engine.kv.range import KvRange
from engine.kv.tiers.runner import InlineRunner, Runner
from kv_transfer.ticket import ParkedChunk


@dataclass(frozen=True, slots=True)
class SwapDone:
    """Report: the copy of a sequence's KV has ended. is_out: whether it went to host memory.
    num_bytes, seconds: of the copy itself."""

    key: Hashable
    is_out: bool
    num_bytes: int
    seconds: float


@dataclass(slots=True, eq=False)
class _Swapped:
    """Swapped KV of a sequence. num_bytes: reserved for it.

    is_reserved: nothing is swapped; the room is for KV that may come before its blocks.
    arrived: chunks that came before their blocks; written after `pieces`, which may hold stale
    bytes in their place.

    pieces: (range, bytes), each at most one block of tokens, or a group's state records.
    is_leaving: whether it is being copied out.
    is_dropped: nobody wants the KV any more; ends a copy under way.
    """

    num_bytes: int
    pieces: list[tuple[KvRange, bytearray]] = field(default_factory=list)
    arrived: Sequence[ParkedChunk] = ()
    is_reserved: bool = False
    is_leaving: bool = True
    is_dropped: bool = False


class SwapSpace:
    """Swapped KV by sequence key. Used by the engine loop's thread; copies run in the runner's."""

    def __init__(
        self,
        kv: KvPool,
        max_num_bytes: int,
        runner: Runner,
        report: Callable[[SwapDone], None],
        clock: Callable[[], float],
    ) -> None:
        """report: called in the runner's thread. clock: monotonic seconds."""
        self._kv = kv
        self._max_num_bytes = max_num_bytes
        self._runner = runner
        self._report = report
        self._clock = clock
        self._swapped: dict[Hashable, _Swapped] = {}
        self.num_bytes = 0
        self.num_swaps = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is swapped out, or being copied."""
        return all(swapped.is_reserved for swapped in self._swapped.values())

    def num_bytes_of(self, num_tokens: int) -> int:
        """Bytes that the KV of `num_tokens` tokens takes here."""
        groups = self._kv.groups
        return sum(map(groups.num_bytes, self._pieces(num_tokens))) + groups.record_bytes

    @property
    def num_free_blocks(self) -> int:
        """Blocks of KV that there is room for."""
        return (self._max_num_bytes - self.num_bytes) // self._kv.layout.block_bytes

    def has_room_for(self, num_tokens: int) -> bool:
        return self.num_bytes + self.num_bytes_of(num_tokens) <= self._max_num_bytes

    def reserve(self, key: Hashable, num_tokens: int) -> None:
        """Keep room for the KV of a sequence. Requires has_room_for(num_tokens)."""
        self._swapped[key] = _Swapped(self.num_bytes_of(num_tokens), is_reserved=True)
        self.num_bytes += self._swapped[key].num_bytes

    def arrive(self, key: Hashable, arrived: Sequence[ParkedChunk]) -> None:
        """Take over chunks, in the room that was reserved: from here on what they take counts.
        copy_in or copy_out follows."""
        swapped = self._swapped[key]
        swapped.arrived, swapped.is_reserved = arrived, False
        self._count(swapped, sum(chunk.num_bytes for chunk in arrived))

    def arrived_start(self, key: Hashable) -> int | None:
        """First token of the chunks that came before their blocks; None if there are none."""
        arrived = self._swapped[key].arrived
        return min(each.first_token for each in arrived) if arrived else None

    def is_leaving(self, key: Hashable) -> bool:
        """Whether a sequence's KV is being copied out, or was and has not begun to come back."""
        return key in self._swapped and self._swapped[key].is_leaving

    def copy_out(self, key: Hashable, block_ids: Sequence[int], num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens of a block table, as far as the sequence
        needs it to continue. Requires has_room_for(num_tokens), unless chunks have arrived."""
        num_bytes = self.num_bytes_of(num_tokens)
        swapped = self._swapped.setdefault(key, _Swapped(0))
        self._count(swapped, swapped.num_bytes + num_bytes)
        self.num_swaps += 1
        table, mark = tuple(block_ids), self._kv.mark()

        def copy() -> None:
            begin_s = self._clock()
            self._kv.follow(mark)
            for place, piece in self._places(table, num_tokens):
                if swapped.is_dropped:
                    break
                data = bytearray(self._kv.groups.num_bytes(piece))
                self._kv.pack(*place, memoryview(data))
                swapped.pieces.append((piece, data))
            self._end(key, num_bytes, begin_s, is_out=True)

        self._runner.submit(copy)

    def copy_in(self, key: Hashable, block_ids: Sequence[int], num_held_tokens: int) -> None:
        """Copy the KV back, except the first `num_held_tokens` tokens (whole blocks), which are
        present. The caller drops it once that is done."""
        swapped, table, mark = self._swapped[key], tuple(block_ids), self._kv.mark()
        swapped.is_leaving = False

        def copy() -> None:
            begin_s = self._clock()
            self._kv.follow(mark)
            for piece, data in swapped.pieces:
                if swapped.is_dropped:
                    break
                if piece.first_token >= num_held_tokens:
                    self._kv.unpack(*self._in_block(table, piece), memoryview(data))
            for chunk in swapped.arrived:
                if not swapped.is_dropped:
                    chunk.write(table)
            self._end(key, swapped.num_bytes, begin_s, is_out=False)

        self._runner.submit(copy, is_urgent=True)

    def drop(self, key: Hashable) -> None:
        """Forget the KV of a sequence. A copy under way ends early and is reported as usual."""
        swapped = self._swapped.pop(key, None)
        if swapped:
            swapped.is_dropped = True
            self.num_bytes -= swapped.num_bytes

    def close(self) -> None:
        """End the thread."""
        self._runner.close(lambda: None)

    def _count(self, swapped: _Swapped, num_bytes: int) -> None:
        self.num_bytes += num_bytes - swapped.num_bytes
        swapped.num_bytes = num_bytes

    def _end(self, key: Hashable, num_bytes: int, begin_s: float, *, is_out: bool) -> None:
        """Wait for the device, then report. Raises RuntimeError if the device has failed."""
        self._kv.synchronize()
        seconds = self._clock() - begin_s
        self._report(SwapDone(key, is_out, num_bytes, seconds))

    def _places(
        self, block_ids: Sequence[int], num_tokens: int
    ) -> Iterator[tuple[tuple[Sequence[int], KvRange], KvRange]]:
        """((blocks, range in them), range in the sequence) of each piece to keep."""
        for whole in self._pieces(num_tokens):
            for piece in self._by_block(whole):
                yield self._in_block(block_ids, piece), piece
        for records in self._kv.groups.records_after(num_tokens):
            yield (block_ids, records), records

    def _pieces(self, num_tokens: int) -> Iterator[KvRange]:
        """Ranges to keep of a sequence, each within one memory."""
        groups = self._kv.groups
        whole = KvRange(0, num_tokens, 0, self._kv.layout.num_layers)
        return kept_parts(self._kv, whole, groups.whole_start(num_tokens))

    def _by_block(self, whole: KvRange) -> Iterator[KvRange]:
        """Split `whole`, which starts at a block boundary, by blocks."""
        size = self._kv.layout.block_size
        for first in range(whole.first_token, whole.end_token, size):
            yield replace(whole, first_token=first, num_tokens=min(size, whole.end_token - first))

    def _in_block(self, block_ids: Sequence[int], piece: KvRange) -> tuple[Sequence[int], KvRange]:
        """Return the block of a piece and the piece relative to it; state records are addressed by
        the whole table."""
        if not self._kv.groups.is_paged(piece):
            return block_ids, piece
        index = piece.first_token // self._kv.layout.block_size
        return block_ids[index : index + 1], replace(piece, first_token=0)


def no_swap(kv: KvPool) -> SwapSpace:
    """A swap space without room, for workers that swap nothing."""
    return SwapSpace(kv, 0, InlineRunner(), lambda _: None, lambda: 0.0)
