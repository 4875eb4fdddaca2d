"""Cost of a handoff: the KV channel between two processes, next to memcpy, a bare socket and
grpc.aio.

    python -m bench.kv_transfer [--sizes 64KiB,1MiB,64MiB] [--rounds 9]
        [--json FILE] [--doc docs/kv_transfer.md]

All variants move the same number of bytes between the same two processes; they take turns within a
round, and medians over the rounds are shown. A handoff is timed from `begin` to the peer's
confirmation that it owns the blocks, including ticket, packing, checksums, unpacking and commit.
The other variants only move bytes into prepared memory.

--doc writes the tables to the part "kv-transfer" of a page.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash

from baton.kv_transports import REMOTE
from bench.kv_ways import (
    LAYOUT,
    Channel,
    Way,
    block_ids_of,
    certificates,
    grpc_aio,
    kv_channel,
    memcpy,
    num_blocks_of,
    raw_socket,
)
from bench.machine import document_of, now, publish
from bench.suite.markdown import about, replaced, table
from bench.threads import cpu_seconds
from engine.kv.range import KvRange
from engine.kv.tensors.paged import TorchKvPool
from kv_transfer.codec import ChunkCodec
from kv_transfer.transport.listeners import DEFAULT_MAX_CHUNK_BYTES
from kv_transfer.wire_format import wire_format

SIZES = "64KiB,512KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_CHECKSUM_PIECE_BYTES = 1 << 20
#: The roof of each variant.
_ROOFS = {"shm scattered": "memcpy", "tcp scattered": "raw tcp"}


def num_bytes_of(text: str) -> int:
    """Parse a size such as "64KiB". Raises ValueError."""
    return int(text[:-3]) * _UNITS[text[-3:]]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one transfer: wall clock; CPU of the busier side; and at the receiver, from the
    presentation of the last ticket to its commit."""

    wall_s: float
    cpu_s: float
    presented_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of many transfers. On a busy machine the best is closer to the real cost than the
    median."""

    median_s: float
    best_s: float
    median_cpu_s: float
    median_presented_s: float = 0.0


def summary_of(costs: Sequence[Cost]) -> Summary:
    wall_s = [cost.wall_s for cost in costs]
    return Summary(
        statistics.median(wall_s),
        min(wall_s),
        statistics.median(cost.cpu_s for cost in costs),
        statistics.median(cost.presented_s for cost in costs),
    )


def peer_cpu_s_of(way: Way) -> float:
    """CPU seconds of the other process's threads; 0 without another process."""
    return cpu_seconds(way.peer_pid) if way.peer_pid else 0.0


def channels(certificate_folder: str) -> dict[str, Channel]:
    """Variants of the KV channel, by name."""
    found: dict[str, Channel] = {}
    for transport in (each.name for each in REMOTE if each.is_installed and not each.needs_device):
        found |= {
            f"{transport} contiguous": Channel(transport, is_scattered=False),
            f"{transport} scattered": Channel(transport),
            f"{transport} int8": Channel(transport, "int8"),
            f"{transport} fp8": Channel(transport, "fp8"),
            f"{transport} secret": Channel(transport, has_secret=True),
        }
    return found | {
        "tcp TLS": Channel("tcp", certificates=certificate_folder),
        "tcp 4 handoffs, 1 connection": Channel("tcp", num_handoffs=4),
        "tcp 4 handoffs, 2 connections": Channel("tcp", num_handoffs=4, num_connections=2),
    }


@contextmanager
def opened(max_bytes: int) -> Iterator[dict[str, Way]]:
    """All variants, ready to transfer."""
    source = TorchKvPool(LAYOUT, num_blocks_of(max_bytes), torch.device("cpu"))
    source.tensor.uniform_(-1, 1)
    with ExitStack() as stack:
        yield {
            "memcpy": stack.enter_context(memcpy(max_bytes)),
            "raw tcp": stack.enter_context(raw_socket(max_bytes)),
            "grpc.aio": stack.enter_context(grpc_aio(max_bytes)),
        } | {
            name: stack.enter_context(kv_channel(channel, source, max_bytes))
            for name, channel in channels(stack.enter_context(certificates())).items()
        }


def timed(way: Way, num_bytes: int) -> Cost:
    transfer = way.prepare(num_bytes)
    peer_cpu_s = peer_cpu_s_of(way)
    own_cpu_s, start = time.process_time(), time.perf_counter()
    transfer()
    wall_s, own_cpu_s = time.perf_counter() - start, time.process_time() - own_cpu_s
    cpu_s = max(own_cpu_s, peer_cpu_s_of(way) - peer_cpu_s)
    return Cost(wall_s, cpu_s, max(way.presented_s(), default=0.0))


def measure(
    ways: dict[str, Way], sizes: Sequence[int], num_rounds: int
) -> dict[str, list[Summary]]:
    """Costs per variant, by size. The first round is a warm-up."""
    found: dict[str, list[Summary]] = {name: [] for name in ways}
    for num_bytes in sizes:
        costs: dict[str, list[Cost]] = {name: [] for name in ways}
        for _ in range(num_rounds + 1):
            for name, way in ways.items():
                costs[name].append(timed(way, num_bytes))
        for name, (_, *counted) in costs.items():
            found[name].append(summary_of(counted))
    return found


@dataclass(frozen=True, slots=True)
class ChecksumCost:
    """Seconds per byte on one side. copied: added by a checksum to a copy between blocks and a
    chunk; negative if the combined pass is faster than the plain copy. alone: checksum of bytes
    just written."""

    copied: float
    alone: float

    def of(self, transport: str) -> float:
        return max(0.0, self.copied) if transport == "shm" else self.alone


def checksum_cost(num_rounds: int = 30) -> ChecksumCost:
    """Medians."""
    num_blocks = 4 * num_blocks_of(DEFAULT_MAX_CHUNK_BYTES)
    pool = TorchKvPool(LAYOUT, num_blocks, torch.device("cpu"))
    codec = ChunkCodec(pool, wire_format(LAYOUT.dtype, LAYOUT))
    blocks = block_ids_of(num_blocks, num_blocks, is_scattered=True)
    chunk = KvRange(0, DEFAULT_MAX_CHUNK_BYTES // LAYOUT.token_bytes, 0, LAYOUT.num_layers)
    data = memoryview(bytearray(DEFAULT_MAX_CHUNK_BYTES))

    def plain() -> None:
        codec.pack(blocks, chunk, data)
        codec.unpack(blocks, chunk, data)

    def checked() -> None:
        checksum = codec.pack_checked(blocks, chunk, data, 0)
        codec.unpack_checked(blocks, chunk, data, 0, checksum)

    piece = np.ones(_CHECKSUM_PIECE_BYTES, np.uint8).data
    plain_s, checked_s, alone_s = _medians(
        num_rounds, plain, checked, lambda: xxhash.xxh3_64_intdigest(piece)
    )
    copied = (checked_s - plain_s) / (2 * DEFAULT_MAX_CHUNK_BYTES)
    return ChecksumCost(copied, alone_s / _CHECKSUM_PIECE_BYTES)


def _medians(num_rounds: int, *runs: Callable[[], object]) -> list[float]:
    """Median seconds of each; they take turns."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(num_rounds):
        for run, times in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


def times_table(sizes: Sequence[str], found: dict[str, list[Summary]]) -> str:
    """Markdown: GB/s of the median and the best, and median microseconds."""

    def cell(size: str, summary: Summary) -> str:
        median, best = (
            num_bytes_of(size) / time_s / 1e9 for time_s in (summary.median_s, summary.best_s)
        )
        return f"{median:.2f}, {best:.2f} ({summary.median_s * 1e6:.0f})"

    rows = [[name, *map(cell, sizes, summaries)] for name, summaries in found.items()]
    return table(("GB/s, best (us)", *sizes), rows)


def ratios(
    sizes: Sequence[str], found: dict[str, list[Summary]], checksum: ChecksumCost
) -> dict[str, dict[str, float]]:
    """By size, for plain handoffs: their rate relative to the roof's and to grpc.aio's (medians,
    bests, and by CPU of the busier side), and the share of one side's time spent on checksums."""

    def of(index: int) -> dict[str, float]:
        summary_by = {name: summaries[index] for name, summaries in found.items()}
        values = {}
        for name, roof in _ROOFS.items():
            own = summary_by[name]
            for other in (roof, "grpc.aio"):
                theirs = summary_by[other]
                values[f"{name} / {other}"] = theirs.median_s / own.median_s
                values[f"{name} / {other}, best"] = theirs.best_s / own.best_s
                values[f"{name} / {other}, CPU"] = theirs.median_cpu_s / own.median_cpu_s
            checksum_s = num_bytes_of(sizes[index]) * checksum.of(name.split()[0])
            values[f"{name}: checksum share"] = checksum_s / own.best_s
        return {name: round(value, 3) for name, value in values.items()}

    return {size: of(index) for index, size in enumerate(sizes)}


def presented_table(sizes: Sequence[str], found: dict[str, list[Summary]]) -> str:
    """Markdown: median microseconds."""
    rows = [
        [name, *(f"{summary.median_presented_s * 1e6:.0f}" for summary in found[name])]
        for name in _ROOFS
    ]
    return table(("From a ticket's presentation to its commit (us)", *sizes), rows)


def ratio_table(found: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    names = next(iter(found.values()))
    rows = [[name, *(f"{of_size[name]:.2f}" for of_size in found.values())] for name in names]
    return table(("ratio", *found), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--doc", type=Path)
    options = parser.parse_args()
    sizes = options.sizes.split(",")
    started = now()
    with opened(max(map(num_bytes_of, sizes))) as ways:
        found = measure(ways, [num_bytes_of(size) for size in sizes], options.rounds)
    checksum = checksum_cost()
    beside = ratios(sizes, found, checksum)
    data = {
        "sizes": sizes,
        "num_rounds": options.rounds,
        "layout": asdict(LAYOUT),
        "checksum": asdict(checksum),
        "summaries": {name: [asdict(one) for one in some] for name, some in found.items()},
        "ratios": beside,
    }
    document = document_of("bench.kv_transfer", started, data)
    what = (
        f"{options.rounds} rounds. The checksum runs at {1e-9 / checksum.alone:.0f} GB/s over "
        f"bytes in the cache, and adds {checksum.copied * 1e12:.1f} ps a byte to a copy."
    )
    tables = (times_table(sizes, found), presented_table(sizes, found), ratio_table(beside))
    body = "\n\n".join([f"{about(document)} {what}", *tables])
    publish(document, options.json, lambda _: body)
    if options.doc:
        options.doc.write_text(replaced(options.doc.read_text(), "kv-transfer", body))


if __name__ == "__main__":
    main()
