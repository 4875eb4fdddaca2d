"""The exposed part of a handoff: from the end of its prefill to the commit, in two processes.

    python -m bench.exposed [--lengths 600,1000,1900] [--num-requests 12]
        [--json FILE] [--doc docs/kv_transfer.md]

Random prompts, one at a time, without prefix caches: all KV is transferred. --doc writes the table
to the part "exposed" of a page.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.client import AsyncClient, SamplingParams, Timing
from baton.config import ServeOptions
from baton.supervisor import Cluster
from baton.supervisor.log_lines import forward_to_stderr
from bench.machine import BUNDLED_MODEL, document_of, now, publish
from bench.suite.markdown import about, replaced, table

#: Within the vocabulary of every measured model, above its special tokens.
_TOKEN_IDS = range(10, 500)


@dataclass(frozen=True, slots=True)
class Handoffs:
    """Handoffs of prompts of one length; index i is the i-th request."""

    num_tokens: int
    num_bytes: int
    exposed_ms: Sequence[float]
    prefill_ms: Sequence[float]

    @property
    def shares(self) -> list[float]:
        """Time added by each handoff, as a share of its prefill."""
        return [e / p for e, p in zip(self.exposed_ms, self.prefill_ms, strict=True)]


def handoffs_of(num_tokens: int, timings: Sequence[Timing]) -> Handoffs:
    """Collect handoffs. Raises ValueError if a prompt was not handed off."""
    if not all(timing.transfer_bytes for timing in timings):
        raise ValueError(f"a prompt of {num_tokens} tokens was computed where it was decoded")
    return Handoffs(
        num_tokens,
        timings[0].transfer_bytes,
        [timing.transfer_exposed_ms for timing in timings],
        [timing.prefill_ms for timing in timings],
    )


async def measure(
    options: ServeOptions, lengths: Sequence[int], num_requests: int
) -> list[Handoffs]:
    """The first request of each length is a warm-up."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    draws = random.Random(0)
    found = []
    async with (
        Cluster(options, on_line=forward_to_stderr) as cluster,
        AsyncClient(cluster.address, max_retries=0) as client,
    ):
        for num_tokens in lengths:
            timings = []
            for _ in range(num_requests + 1):
                prompt = draws.choices(_TOKEN_IDS, k=num_tokens)
                timings.append((await client.generate(prompt, params)).timing)
            found.append(handoffs_of(num_tokens, timings[1:]))
    return found


def table_of(found: Sequence[Handoffs]) -> str:
    """Markdown."""
    headings = ("Prompt", "KV", "Exposed, median (least, most)")
    rows = [
        [
            str(each.num_tokens),
            f"{each.num_bytes / 1e6:.1f} MB",
            f"{statistics.median(each.exposed_ms):.2f} ms "
            f"({min(each.exposed_ms):.2f}, {max(each.exposed_ms):.2f})",
            f"{statistics.median(each.prefill_ms):.0f} ms",
            f"{statistics.median(each.shares):.2%} ({max(each.shares):.2%})",
        ]
        for each in found
    ]
    return table((*headings, "Prefill, median", "Share, median (most)"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--lengths", default="600,1000,1900")
    parser.add_argument("--num-requests", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--doc", type=Path)
    given = parser.parse_args()
    started = now()
    options = ServeOptions(
        model=given.model,
        dtype="float32",
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False,
        port=0,
        log_level="warning",
    )
    lengths = [int(length) for length in given.lengths.split(",")]
    found = asyncio.run(measure(options, lengths, given.num_requests))
    data = {"found": [asdict(one) for one in found]}
    document = document_of("bench.exposed", started, data)
    what = f"{Path(given.model).name} in float32, {given.num_requests} requests a row."
    body = f"{about(document)} {what}\n\n{table_of(found)}"
    publish(document, given.json, lambda _: body)
    if given.doc:
        given.doc.write_text(replaced(given.doc.read_text(), "exposed", body))


if __name__ == "__main__":
    main()
