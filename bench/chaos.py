"""Faults on real processes and links under load: their cost, and the correctness of every stream.

    python -m bench.chaos [--num-streams 500] [--seed N] [--only TEXT] [--json FILE]
        [--window N] [--states]

Starts a gateway and prefill and decode workers on oracle engines, which have a known correct
output, with a proxy on every link between them and to the clients. `--concurrency` streams run at
any time, each of 1 or 2 choices, greedy or seeded; some clients stop reading for a while, and some
cancel. Faults are injected one at a time. A stream is exposed to a fault if it ran between the
fault and the moment when all workers were ready again; the next fault follows when enough streams
were exposed and all of them have ended. No block may be held 10 s after the last stream. --window
and --states: the workers' --oracle-window and --oracle-has-states.

Shown per fault: exposed streams; the resumed, failed and wrong ones among them (a token lost,
duplicated or different from the oracle's, output after the end, or wrong usage); the longest gap
between two tokens of resumed streams with active readers (the resume gap); and the longest gap of
any stream.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.check.fault_load import (
    FaultResult,
    Load,
    StreamRecord,
    leaked_blocks,
    load_through_faults,
    results_by_fault,
)
from baton.check.process_faults import Fault
from baton.client import AsyncClient
from baton.config import ServeOptions
from bench.chaos_faults import FAULTS, LinkedTarget
from bench.fault_proxy import ProxiedCluster
from bench.machine import BUNDLED_MODEL, document_of, now, publish
from bench.oracle_requests import OracleRequest, draw_request
from bench.suite.markdown import table
from engine.oracle import OracleLayers

STEP_MS = 16.0
CHUNK_TOKENS = 128
NUM_TOKENS = 160
MAX_PROMPT_TOKENS = 400

#: Maximum seconds to recompute a prompt and all its output, alone.
REPREFILL_S = (MAX_PROMPT_TOKENS + NUM_TOKENS) / CHUNK_TOKENS * STEP_MS / 1e3


async def chaos(
    faults: Sequence[Fault[LinkedTarget]],
    num_streams: int,
    concurrency: int,
    seed: int,
    console: Console,
    layers: OracleLayers,
) -> tuple[list[FaultResult], int]:
    """Results by fault, and leaked blocks, after `num_streams` streams were exposed to a fault."""
    options = ServeOptions(
        model=BUNDLED_MODEL,
        engine="oracle",
        generation_config="none",
        oracle_step_ms=STEP_MS,
        oracle_window=layers.window,
        oracle_has_states=layers.has_states,
        max_num_batched_tokens=CHUNK_TOKENS,
        num_prefill_workers=2,
        num_decode_workers=2,
        prefill_block_size=32,
        decode_block_size=8,
        num_gpu_blocks_override=4000,
        kv_transport="tcp",
        port=0,
        drain_timeout_s=5,
        log_level="error",
    )
    records: list[StreamRecord[OracleRequest]] = []
    async with (
        ProxiedCluster(options) as cluster,
        AsyncClient(cluster.front, max_retries=0) as client,
        AsyncClient(cluster.address, max_retries=0) as observer,
    ):
        draw = partial(_draw, layers=layers)
        load = Load(client, draw, random.Random(seed), concurrency, records.append)

        def on_fault(fault: Fault[LinkedTarget]) -> None:
            console.print(f"{fault.name}: {load.num_faulted} streams faulted so far")

        num_rounds = await load_through_faults(
            load,
            faults,
            lambda number: LinkedTarget(cluster, number % 2, 1 - number % 2),
            client,
            lambda _: load.num_faulted >= num_streams,
            on_fault,
        )
        num_leaked = await leaked_blocks(observer)
    compare_with_oracle(records)
    return results_by_fault(faults, num_rounds, records), num_leaked


def _draw(rng: random.Random, layers: OracleLayers) -> OracleRequest:
    return draw_request(rng, MAX_PROMPT_TOKENS, NUM_TOKENS, layers)


def compare_with_oracle(records: Sequence[StreamRecord[OracleRequest]]) -> None:
    """Check streams after the run, in other processes: the oracle takes longer than the streams'
    steps."""
    context = multiprocessing.get_context("spawn")
    requests = [record.request for record in records]
    with ProcessPoolExecutor(mp_context=context) as pool:
        outputs = pool.map(OracleRequest.right_output, requests, chunksize=8)
        for record, right in zip(records, outputs, strict=True):
            record.compare(right)


def table_of(document: Mapping[str, Any]) -> str:
    """Markdown, one line per fault."""
    headings = ("Fault", "Times", "Streams through it", "Resumed", "Errors", "Wrong")
    rows = []
    for found in document["faults"]:
        counts = ("num_faults", "num_streams", "num_resumed", "num_errors", "num_wrong")
        gaps = (found["gap_p50_s"], found["gap_p99_s"], found["longest_s"])
        rows.append(
            [found["fault"], *(str(found[key]) for key in counts), *(f"{gap:.2f}" for gap in gaps)]
        )
    return table((*headings, "Gap p50, s", "p99, s", "Longest, s"), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--num-streams", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="faults that have this in their names")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--states", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    started = now()
    console = Console()
    faults = [fault for fault in FAULTS if arguments.only in fault.name]
    if not faults:
        parser.error(f"--only={arguments.only}: no fault has this in its name")
    layers = OracleLayers(arguments.window, has_states=arguments.states)
    results, num_leaked = asyncio.run(
        chaos(faults, arguments.num_streams, arguments.concurrency, arguments.seed, console, layers)
    )
    num_wrong = sum(result.num_wrong for result in results)
    console.print(f"wrong streams: {num_wrong}; blocks leaked: {num_leaked}")
    console.print(f"longest re-prefill: {REPREFILL_S:.3f} s")
    data = {"faults": [asdict(one) for one in results], "num_leaked_blocks": num_leaked}
    publish(document_of("bench.chaos", started, data), arguments.json, table_of)
    return 1 if num_wrong or num_leaked else 0


if __name__ == "__main__":
    sys.exit(main())
