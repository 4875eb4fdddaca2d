"""What tiers of KV gain: hit rate and time to first token, with and without them.

    python -m bench.kv_tiers FILE [--num-requests 120] [--input-scale 0.02] [--rounds 2]
        [--tier kv_host_bytes=1GiB ...] [--settings short ample unique] [--json FILE]
        [--doc docs/kv_tiers.md]

FILE is a trace with hash_ids, as `bench.load` reads it. The load are its conversations: requests
that begin with the same block of a prefix, at least three each, in the order of the trace, one at a
time. Three settings, each with a colocated worker with tiers and two without them, which take turns
with every request:

    short   the device has room for half of all prefixes
    ample   it has room for all of them: nothing to gain
    unique  half the room, and prompts that have nothing in common: nothing to gain either

The two without tiers against each other are the noise floor. CPU time is that of all threads of the
worker, for a machine that others use. Then a worker with a disk is stopped
and started anew, to see what it keeps.

Goals: short: hit rate at least 1.5 times, mean time to first token at most 0.7 times; else at least
0.98 times as many requests a second, and a CPU second; at least 0.9 of the bytes on the disk after
a restart.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from baton.client import AsyncClient
from baton.supervisor import Cluster
from bench.drive import COLOCATED, DriveOptions, cluster_options, drive, started
from bench.machine import BUNDLED_MODEL, document_of, now, publish
from bench.measure import Record
from bench.suite.markdown import about, replaced, table
from bench.threads import cpu_seconds
from bench.workload import fitted, requests_of
from engine.plan.trace import TraceEntry, read_trace

#: Least requests of a conversation.
_MIN_TURNS = 3
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 2048
#: Bytes of the bundled model's KV blocks are few: no tier is ever full.
_TIERS = ("kv_host_bytes=1GiB",)
_DISK_BYTES = "1GiB"
_WITHOUT, _AGAIN, _WITH = "without", "without, again", "with"
_SETTINGS = ("short", "ample", "unique")


@dataclass(frozen=True, slots=True)
class Pass:
    """One way through a load. hit_rate: share of prompt tokens that were cached. cpu_s: of the
    worker. ttfts_ms: of each request, in the same order for all targets."""

    setting: str
    target: str
    hit_rate: float
    requests_per_s: float
    cpu_s: float
    ttfts_ms: tuple[float, ...]

    @property
    def ttft_ms(self) -> float:
        """Mean."""
        return fmean(self.ttfts_ms)

    @property
    def requests_per_cpu_s(self) -> float:
        return len(self.ttfts_ms) / self.cpu_s


@dataclass(frozen=True, slots=True)
class Restart:
    """A worker's disk tier before and after its restart. hit_rate: of prompts asked again."""

    bytes_before: int
    bytes_after: int
    hit_rate: float

    @property
    def share(self) -> float:
        return self.bytes_after / self.bytes_before


class Target(NamedTuple):
    """A colocated server. pid: of its worker."""

    client: AsyncClient
    pid: int


def conversations(entries: Sequence[TraceEntry], num_requests: int) -> tuple[TraceEntry, ...]:
    """Requests of the first conversations of a trace, in its order. Raises ValueError if there are
    fewer."""
    turns = Counter(entry.hash_ids[:1] for entry in entries)
    chosen: set[tuple[int, ...]] = set()
    num_chosen = 0
    for entry in entries:
        first = entry.hash_ids[:1]
        if first and turns[first] >= _MIN_TURNS and first not in chosen:
            if num_chosen >= num_requests:
                break
            chosen.add(first)
            num_chosen += turns[first]
    if num_chosen < num_requests:
        raise ValueError(f"the trace has {num_chosen} requests of conversations; give fewer")
    return tuple(entry for entry in entries if entry.hash_ids[:1] in chosen)


def num_prefix_blocks(entries: Sequence[TraceEntry]) -> int:
    """KV blocks that hold all different prompts at once."""
    names = {name for entry in entries for name in entry.hash_ids}
    return len(names) * entries[0].block_tokens // _BLOCK_SIZE


def unique(entries: Sequence[TraceEntry]) -> tuple[TraceEntry, ...]:
    """The same lengths, nothing in common."""
    return tuple(replace(entry, hash_ids=()) for entry in entries)


async def run(
    client: AsyncClient, entries: Sequence[TraceEntry], vocab_size: int, salt: str
) -> list[Record]:
    """Send requests one after another."""
    records: list[Record] = []
    for request in requests_of(entries, [0.0] * len(entries), vocab_size, seed=1):
        records += await drive(client, (request,), DriveOptions(cache_salt=salt))
    return records


async def by_turns(
    setting: str,
    targets: Mapping[str, Target],
    entries: Sequence[TraceEntry],
    vocab_size: int,
    number: int,
) -> list[Pass]:
    """Send each request to one target after the other, another one first each time."""
    clients = {name: target.client for name, target in targets.items()}
    before_s = {name: cpu_seconds(target.pid) for name, target in targets.items()}
    records: dict[str, list[Record]] = {name: [] for name in clients}
    names = list(clients)
    requests = requests_of(entries, [0.0] * len(entries), vocab_size, seed=1)
    for index, request in enumerate(requests):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            options = DriveOptions(cache_salt=str(number))
            records[name] += await drive(clients[name], (request,), options)
    return [
        summary(setting, name, records[name], cpu_seconds(target.pid) - before_s[name])
        for name, target in targets.items()
    ]


def summary(setting: str, target: str, records: Sequence[Record], cpu_s: float = 0.0) -> Pass:
    """Raises RuntimeError if a request failed."""
    times = [record.ttft_ms for record in records if record.ttft_ms is not None]
    if len(times) < len(records):
        raise RuntimeError(f"{setting}, {target}: a request failed")
    num_cached = sum(record.num_cached_tokens for record in records)
    num_tokens = sum(record.num_prompt_tokens for record in records)
    seconds = sum(record.end_s - record.sent_s for record in records)
    per_s = len(records) / seconds
    return Pass(setting, target, num_cached / num_tokens, per_s, cpu_s, tuple(times))


def _options(settings: Mapping[str, object], num_blocks: int) -> dict[str, object]:
    return {
        "colocated": True,
        "block_size": _BLOCK_SIZE,
        "max_model_len": _MAX_MODEL_LEN,
        "num_gpu_blocks_override": max(num_blocks, _MAX_MODEL_LEN // _BLOCK_SIZE),
        "max_num_seqs": 8,
        **settings,
    }


async def measure(
    model: str,
    loads: Mapping[str, tuple[tuple[TraceEntry, ...], int]],
    tiers: Mapping[str, object],
    num_rounds: int,
) -> list[Pass]:
    """loads: by setting, requests and blocks of the device."""
    passes: list[Pass] = []
    for setting, (entries, num_blocks) in loads.items():
        clusters = {
            name: cluster_options(model, _options(own, num_blocks), compares=False)[COLOCATED]
            for name, own in ((_WITHOUT, {}), (_WITH, tiers), (_AGAIN, {}))
        }
        async with AsyncExitStack() as stack:
            targets: dict[str, Target] = {}
            for name, options in clusters.items():
                cluster = await stack.enter_async_context(Cluster(options))
                client = AsyncClient(cluster.address, max_retries=0)
                await stack.enter_async_context(client)
                targets[name] = Target(client, cluster.pid_of("decode-0"))
            vocab_size = (await targets[_WITHOUT].client.model()).vocab_size
            for target in targets.values():
                await run(target.client, entries[:5], vocab_size, "warm")
            for number in range(num_rounds):
                passes += await by_turns(setting, targets, entries, vocab_size, number)
    return passes


async def restart(model: str, entries: Sequence[TraceEntry], num_blocks: int) -> Restart:
    """Fill a worker's disk tier, and start the worker anew."""
    with tempfile.TemporaryDirectory() as folder:
        disk = {"kv_disk_dir": folder, "kv_disk_bytes": _DISK_BYTES}
        options = cluster_options(model, _options(disk, num_blocks), compares=False)
        before = after = 0
        records: list[Record] = []
        for is_first in (True, False):
            async with started(options) as clients:
                client = clients[COLOCATED]
                vocab_size = (await client.model()).vocab_size
                await run(client, unique(entries[:5]), vocab_size, "warm")
                if not is_first:
                    after = await _bytes_on_disk(client)
                records = await run(client, entries, vocab_size, "again")
                if is_first:
                    before = await _bytes_on_disk(client)
    return Restart(before, after, summary("restart", _WITH, records).hit_rate)


async def _bytes_on_disk(client: AsyncClient) -> int:
    await asyncio.sleep(1.0)  # a load report later
    return sum(
        tier.num_bytes for worker in (await client.model()).workers for tier in worker.kv_tiers
    )


def rows(passes: Sequence[Pass]) -> Iterator[tuple[str, ...]]:
    for setting in dict.fromkeys(each.setting for each in passes):
        of = {
            target: [each for each in passes if (each.setting, each.target) == (setting, target)]
            for target in (_WITHOUT, _AGAIN, _WITH)
        }

        def mean(target: str, name: str, of: Mapping[str, list[Pass]] = of) -> float:
            return fmean(getattr(each, name) for each in of[target])

        for target in (_WITHOUT, _AGAIN, _WITH):
            ratios = [
                mean(target, name) / (mean(_WITHOUT, name) or 1e-9)
                for name in ("hit_rate", "ttft_ms", "requests_per_s", "requests_per_cpu_s")
            ]
            yield (
                setting,
                target,
                f"{mean(target, 'hit_rate'):.2f}",
                f"{mean(target, 'ttft_ms'):.1f}",
                *(f"{ratio:.2f}" if ratio < 100 else "" for ratio in ratios),
                f"{_pairs(of[target], of[_WITHOUT]):.2f}",
            )


def _pairs(passes: Sequence[Pass], others: Sequence[Pass]) -> float:
    """Median over requests of the ratio of their times to the first token."""
    return median(
        ours / theirs
        for one, other in zip(passes, others, strict=True)
        for ours, theirs in zip(one.ttfts_ms, other.ttfts_ms, strict=True)
    )


def section(passes: Sequence[Pass], kept: Restart) -> str:
    """Markdown of the results."""
    heads = (
        "Setting",
        "Tiers",
        "Hit rate",
        "TTFT, ms",
        "Hit rate, x",
        "TTFT, x",
        "Requests/s, x",
        "Requests/CPU s, x",
        "TTFT, x, median",
    )
    return (
        table(heads, list(rows(passes)))
        + f"\n\nA restart kept {kept.share:.2f} of the bytes on the disk, and "
        f"{kept.hit_rate:.2f} of the tokens of the same prompts were then cached."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", default=str(BUNDLED_MODEL))
    parser.add_argument("--num-requests", type=int, default=120)
    parser.add_argument("--input-scale", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tier", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--settings", nargs="+", choices=_SETTINGS, default=_SETTINGS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--doc", type=Path)
    given = parser.parse_args()
    chosen = conversations(read_trace(given.trace), given.num_requests)
    entries = tuple(fitted(each, given.input_scale, 0.02, _MAX_MODEL_LEN) for each in chosen)
    num_blocks = num_prefix_blocks(entries)
    loads = {
        "short": (entries, num_blocks // 2),
        "ample": (entries, (given.rounds + 1) * num_blocks),
        "unique": (unique(entries), num_blocks // 2),
    }
    loads = {setting: loads[setting] for setting in given.settings}
    tiers = dict(pair.split("=", 1) for pair in given.tier or _TIERS)
    began = now()
    passes = asyncio.run(measure(given.model, loads, tiers, given.rounds))
    kept = asyncio.run(restart(given.model, entries, num_blocks // 2))
    data = {
        "trace": given.trace.name,
        "num_requests": len(entries),
        "num_blocks": {setting: blocks for setting, (_, blocks) in loads.items()},
        "tiers": tiers,
        "passes": [asdict(each) for each in passes],
        "restart": asdict(kept),
    }
    document = document_of("bench.kv_tiers", began, data)
    body = f"{about(document)} {len(entries)} requests of {given.trace.name}.\n\n"
    body += section(passes, kept)
    publish(document, given.json, lambda _: body)
    if given.doc:
        given.doc.write_text(replaced(given.doc.read_text(), "kv-tiers", body))


if __name__ == "__main__":
    main()
