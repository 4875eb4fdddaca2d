"""What of a handoff a request sees: from the end of its prefill to the writing of the commit, in
two processes.

    python -m bench.exposed [--lengths 600,1000,1900] [--num-requests 12]
        [--json FILE] [--doc docs/kv_transfer.md]

Random prompts, one at a time, prefix caches off: all KV is moved. --doc puts the table into a page,
where its part "exposed" is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baton.client import AsyncClient, SamplingParams, Timing
from baton.config import ServeOptions
from baton.supervisor import Cluster
from baton.supervisor.log_lines import forward_to_stderr
from bench.machine import describe_machine, describe_versions
from bench.suite.markdown import replaced

#: Below the vocabulary of every model that is measured, and above its special tokens.
_TOKEN_IDS = range(10, 500)


@dataclass(frozen=True, slots=True)
class Handoffs:
    """Those of prompts of one length: [i] is of the i-th request."""

    num_tokens: int
    num_bytes: int
    exposed_ms: Sequence[float]
    prefill_ms: Sequence[float]

    @property
    def shares(self) -> list[float]:
        """Of the time of the prefill before it, what each handoff adds."""
        return [e / p for e, p in zip(self.exposed_ms, self.prefill_ms, strict=True)]


def handoffs_of(num_tokens: int, timings: Sequence[Timing]) -> Handoffs:
    """Raises ValueError if a prompt was not handed off: then there is nothing to measure."""
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
    """The first request of each length only warms up."""
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


def table(found: Sequence[Handoffs]) -> str:
    """Markdown."""
    rows = [
        "| Prompt | KV | Exposed, median (least, most) | Prefill, median | Share, median (most) |",
        "|---|---|---|---|---|",
    ]
    for each in found:
        exposed, shares = each.exposed_ms, each.shares
        rows.append(
            f"| {each.num_tokens} | {each.num_bytes / 1e6:.1f} MB "
            f"| {statistics.median(exposed):.2f} ms ({min(exposed):.2f}, {max(exposed):.2f}) "
            f"| {statistics.median(each.prefill_ms):.0f} ms "
            f"| {statistics.median(shares):.2%} ({max(shares):.2%}) |"
        )
    return "\n".join(rows)


def markdown(
    found: Sequence[Handoffs], machine: dict[str, Any], versions: dict[str, str], model: str
) -> str:
    """What was run, where, and the table."""
    load = ", ".join(f"{value:.1f}" for value in machine["load_average"])
    return (
        f"{datetime.now(UTC).date().isoformat()}, {machine['num_cores']} cores of "
        f"{machine['cpu']}, python {versions['python']}, torch {versions['torch']}; "
        f"{model} in float32, {len(found[0].exposed_ms)} requests a row; "
        f"load averages at the end {load}.\n\n{table(found)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/baton-py-6m")
    parser.add_argument("--lengths", default="600,1000,1900")
    parser.add_argument("--num-requests", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--doc", type=Path)
    given = parser.parse_args()
    options = ServeOptions(
        model=given.model, dtype="float32", enable_prefix_caching=False, port=0, log_level="warning"
    )
    lengths = [int(length) for length in given.lengths.split(",")]
    found = asyncio.run(measure(options, lengths, given.num_requests))
    machine, versions = describe_machine(), describe_versions()
    table = markdown(found, machine, versions, given.model)
    print(table)
    if given.json:
        result = {"machine": machine, "versions": versions, "found": [asdict(f) for f in found]}
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    if given.doc:
        given.doc.write_text(replaced(given.doc.read_text(), "exposed", table))


if __name__ == "__main__":
    main()
