"""Cost of packing KV with windowed layers in a pool of their own.

Compares chunks of all layers, which span two pools, with chunks of one group each, and with a
single pool.

    python -m bench.kv_groups [--rounds 30] [--json FILE] [--doc docs/kv_transfer.md]

The layers of Gemma 3 4B (29 of 34 windowed), bfloat16, scattered blocks, all within the window, so
that every variant moves the same bytes: from a pool into a chunk with its checksum, and from the
chunk into another pool. One thread; variants take turns; medians. --doc writes the table to the
part "kv-groups" of a page.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.types import KvLayout
from bench.machine import document_of, now, publish
from bench.suite.markdown import about, replaced, table
from engine.kv.layout import groups_of
from engine.kv.range import KvRange
from engine.kv.tensors.paged import GroupedTensorPool, TorchKvPool, host_pool
from kv_transfer.codec import ChunkCodec
from kv_transfer.transport.listeners import DEFAULT_MAX_CHUNK_BYTES
from kv_transfer.wire_format import chunks, wire_format

_NUM_LAYERS = 34
LAYOUT = KvLayout(
    *("bench", _NUM_LAYERS, 4, 256, "bfloat16", 16),
    window=1024,
    windowed_layers=tuple(layer for layer in range(_NUM_LAYERS) if layer % 6 != 5),
)
_NUM_TOKENS = 1024
_NUM_BLOCKS = 2 * LAYOUT.num_blocks_for(_NUM_TOKENS)


@dataclass(frozen=True, slots=True)
class Rate:
    """Median bytes per second."""

    pack: float
    unpack: float


class Side:
    """A pool, and one sequence's blocks in it."""

    def __init__(self, is_grouped: bool) -> None:
        self.pool: TorchKvPool | GroupedTensorPool
        if is_grouped:
            self.pool = grouped = GroupedTensorPool(LAYOUT, _NUM_BLOCKS, _NUM_BLOCKS, host_pool)
            (slots,) = grouped.groups.allocators(grouped.slot_tables)
            for block_id in random.Random(2).sample(range(_NUM_BLOCKS), _NUM_BLOCKS):
                slots.on_write(set(), (block_id,), range(1))
        else:
            self.pool = host_pool(LAYOUT, _NUM_BLOCKS)
        num_blocks = LAYOUT.num_blocks_for(_NUM_TOKENS)
        self.block_ids = tuple(random.Random(1).sample(range(_NUM_BLOCKS), num_blocks))
        self.codec = ChunkCodec(self.pool, wire_format(LAYOUT.dtype, LAYOUT))


class Way:
    """Transfer from one pool to another, in chunks."""

    def __init__(self, *, is_grouped: bool, by_group: bool) -> None:
        self._source, self._target = Side(is_grouped), Side(is_grouped)
        whole = KvRange(0, _NUM_TOKENS, 0, LAYOUT.num_layers)
        size, most = LAYOUT.token_layer_bytes, DEFAULT_MAX_CHUNK_BYTES
        self.chunks = [
            chunk
            for part in groups_of(LAYOUT).kept(whole, 0, by_group=by_group)
            for chunk in chunks(part, size, most, LAYOUT.block_size)
        ]
        self._memory = memoryview(bytearray(most))
        # Warm-up: first touches cost more.
        self.move()

    def move(self) -> tuple[float, float]:
        """Seconds of packing and of unpacking."""
        pack_s = unpack_s = 0.0
        for chunk in self.chunks:
            data = self._memory[: chunk.num_bytes(LAYOUT.token_layer_bytes)]
            start = time.perf_counter()
            source, target = self._source, self._target
            checksum = source.codec.pack_checked(source.block_ids, chunk, data, 0)
            packed = time.perf_counter()
            if not target.codec.unpack_checked(target.block_ids, chunk, data, 0, checksum):
                raise RuntimeError("a chunk did not arrive as it was packed")
            pack_s, unpack_s = pack_s + packed - start, unpack_s + time.perf_counter() - packed
        return pack_s, unpack_s


def measure(num_rounds: int) -> dict[str, Rate]:
    ways = {
        "one pool, chunks of all layers": Way(is_grouped=False, by_group=False),
        "two pools, chunks of all layers": Way(is_grouped=True, by_group=False),
        "two pools, chunks of one group": Way(is_grouped=True, by_group=True),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, way in ways.items():
            seconds[name].append(way.move())
    num_bytes = _NUM_TOKENS * LAYOUT.token_bytes
    return {name: _rate(num_bytes, times) for name, times in seconds.items()}


def _rate(num_bytes: int, times: Sequence[tuple[float, float]]) -> Rate:
    pack_s, unpack_s = (statistics.median(column) for column in zip(*times, strict=True))
    return Rate(num_bytes / pack_s, num_bytes / unpack_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--doc", type=Path)
    options = parser.parse_args()
    started = now()
    found = measure(options.rounds)
    data = {
        "num_rounds": options.rounds,
        "num_tokens": _NUM_TOKENS,
        "layout": asdict(LAYOUT),
        "rates": {name: asdict(rate) for name, rate in found.items()},
    }
    document = document_of("bench.kv_groups", started, data)
    rows = [
        [name, f"{rate.pack / 1e9:.1f}", f"{rate.unpack / 1e9:.1f}"] for name, rate in found.items()
    ]
    body = "\n\n".join(
        [
            f"{about(document)} {options.rounds} rounds.",
            table(("GB/s", "pack and hash", "unpack and hash"), rows),
        ]
    )
    publish(document, options.json, lambda _: body)
    if options.doc:
        options.doc.write_text(replaced(options.doc.read_text(), "kv-groups", body))


if __name__ == "__main__":
    main()
