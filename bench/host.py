"""Cost of the host without an engine: the decode tier's step, and the gateway. See bench/README.md.

    python -m bench.host [--num-seqs 16 ...] [--json FILE]

Tier: a decode core over an engine that computes nothing, for several numbers of sequences, in a
pool of --num-blocks. Costs per sequence, block or ticket should not grow with their number.
Gateway: its process between a token source and raw gRPC and HTTP streams of this process; tokens
per second of its CPU time, by the source's pace, beside bare gRPC and HTTP servers that write the
same chunks; and the added time to first token. Connections: cost of --num-connections idle ones,
and of clients that do not read. Service: share of an engine's tokens that clients get, with steps
of --step-ms that use no CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from bench.host_connections import measure_idle, measure_slow_readers
from bench.host_gateway import (
    AddedTtft,
    Door,
    Flow,
    GatewayCosts,
    measure_added_ttft,
    measure_flow,
)
from bench.host_service import measure_service
from bench.host_tier import measure_tier
from bench.machine import BUNDLED_MODEL, document_of, now, publish
from bench.suite.host_tables import gateway_table, scheduler_table

#: Measured steps, for the fewest and for the most sequences.
_MOST_STEPS, _FEWEST_STEPS = 100, 9
_NUM_STEPPED = 20_000

_NUM_SERVED_TOKENS = 200

#: Tokens per stream of a client that does not read: more than socket buffers hold.
_NUM_HELD_TOKENS = 1000


def flows_of(num_streams: int) -> tuple[Flow, ...]:
    """Flows with the steps of a large model, with one and with several tokens; then shorter steps,
    until a core is overloaded."""
    return (
        Flow(num_streams, 100, 1, 20.0),
        Flow(num_streams, 800, 8, 20.0),
        Flow(num_streams, 200, 1, 10.0),
        Flow(num_streams, 400, 1, 5.0),
        Flow(num_streams, 2000, 1, 1.0),
        Flow(num_streams, 4000, 1, 0.5),
        Flow(num_streams, 8000, 1, 0.2),
    )


async def measure_gateway(
    model: str, num_streams: int, num_requests: int, door: Door
) -> tuple[AddedTtft, list[GatewayCosts]]:
    """Measure flows one after the other, each with a new gateway."""
    ttft = await measure_added_ttft(model, num_requests, door)
    return ttft, [await measure_flow(model, flow, door) for flow in flows_of(num_streams)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[16, 256, 1024, 4096])
    parser.add_argument("--num-blocks", type=int, default=1_000_000)
    parser.add_argument("--num-streams", type=int, default=64)
    parser.add_argument("--num-requests", type=int, default=300)
    parser.add_argument("--num-connections", type=int, default=5000)
    parser.add_argument("--idle-s", type=float, default=5.0)
    parser.add_argument("--step-ms", type=float, default=12.0)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--doors", nargs="+", choices=("grpc", "http"), default=["grpc", "http"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    started = now()
    # Discarded warm-up: pays the one-time costs of the process.
    measure_tier(arguments.num_seqs[0], arguments.num_blocks, steps_for(arguments.num_seqs[0]))
    tier = [
        measure_tier(num_seqs, arguments.num_blocks, steps_for(num_seqs))
        for num_seqs in arguments.num_seqs
    ]
    data: dict[str, Any] = {
        "num_blocks": arguments.num_blocks,
        "tier": [dataclasses.asdict(one) for one in tier],
    }
    for door in arguments.doors:
        measured = measure_gateway(
            arguments.model, arguments.num_streams, arguments.num_requests, door
        )
        ttft, flows = asyncio.run(measured)
        end = "" if door == "grpc" else f"_{door}"
        data[f"gateway{end}"] = [dataclasses.asdict(one) for one in flows]
        added = {"added_ms": ttft.added_ms, "beside_bare_ms": ttft.beside_bare_ms}
        data[f"added_ttft_ms{end}"] = {**dataclasses.asdict(ttft), **added}
    if "http" in arguments.doors:
        model = arguments.model
        idle = asyncio.run(measure_idle(model, arguments.num_connections, arguments.idle_s))
        slow = asyncio.run(measure_slow_readers(model, arguments.num_streams, _NUM_HELD_TOKENS))
        data["idle"], data["slow_readers"] = dataclasses.asdict(idle), dataclasses.asdict(slow)
    service = asyncio.run(
        measure_service(
            arguments.model, arguments.num_streams, _NUM_SERVED_TOKENS, arguments.step_ms
        )
    )
    data["service"] = {**dataclasses.asdict(service), "share": service.share}
    document = document_of("bench.host", started, data)
    publish(document, arguments.json, scheduler_table, gateway_table)


def steps_for(num_seqs: int) -> int:
    """Number of measured steps: more if they are shorter."""
    return min(max(_NUM_STEPPED // num_seqs, _FEWEST_STEPS), _MOST_STEPS)


if __name__ == "__main__":
    main()
