"""Baton's servers beside those of vLLM and llama.cpp by HTTP, under an open loop of completions:
answers inside the same latency targets.

    python -m bench.peers.open_loop [--model 125m] [--rate 1 4] [--num-requests 24] [--before 8]
        [--ttft-slo-ms 1500] [--tpot-slo-ms 100] [--threads N] [--json FILE]

All servers are up at once, with the same cores, bounds and requests, and take turns at each rate:
Baton in two tiers and colocated, peers with each chunk of bench.peers.processes.CHUNKS. Every run
first serves another load of the same kind, which is not counted. The first takes two turns: the
difference is the noise. Goodput is the number of answers inside both targets for each second of the
run. openvino-genai has no server.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baton.config import ServeOptions
from baton.errors import BatonError
from baton.supervisor import ChildFailed, Cluster
from bench.drive import COLOCATED, SPLIT, cluster_options
from bench.drive_http import COMPLETIONS, Dialect, drive_http
from bench.machine import document_of, now, publish
from bench.measure import Record, Slo, summarise
from bench.peers.llama_server import llama_server
from bench.peers.models import NAMES, PeerMissing, checkpoint, peer_versions
from bench.peers.processes import CHUNKS, ContenderFailed
from bench.peers.server import Bounds, PeerServer, free_port, running
from bench.peers.vllm_server import vllm_server
from bench.plan import runs_of
from bench.slo_servers import Load
from bench.suite.served_table import AGAIN, TWICE, served_table

#: Lengths of bench.slo_servers.Load, scaled so that a prompt takes tenths of a second.
_INPUT_SCALE = 0.3
#: The longest of its requests, scaled or not.
_MAX_MODEL_LEN = 1024 + 64
_MAX_NUM_SEQS = 16
_KV_BYTES = 1 << 30
#: Prompts are of token ids below this, which every model here has.
_VOCAB_SIZE = 250
#: By the name in CHUNKS.
_PEERS: Mapping[str, Callable[[str, int, Bounds, int], PeerServer]] = {
    "llama.cpp": llama_server,
    "vllm": vllm_server,
}


def baton_options(folder: str, bounds: Bounds) -> dict[str, ServeOptions]:
    """Options of `baton serve` by shape. Raises ConfigError."""
    common = {
        "dtype": "bfloat16",
        "speculative_method": "none",
        "max_model_len": bounds.max_model_len,
        "max_num_seqs": bounds.max_num_seqs,
        "swap_space": 0.0,
    }
    tiers = {**common, "kv_cache_memory_bytes": bounds.kv_bytes // 2}
    alone = {
        **common,
        "kv_cache_memory_bytes": bounds.kv_bytes,
        "colocated": True,
        "num_decode_workers": 1,
    }
    return {
        SPLIT: cluster_options(folder, tiers, compares=False)[SPLIT],
        COLOCATED: cluster_options(folder, alone, compares=False)[COLOCATED],
    }


async def measure(
    model: str, bounds: Bounds, rates: Sequence[float], load: Load
) -> tuple[dict[tuple[str, float], Sequence[Record]], dict[str, str]]:
    """Records by contender and rate, and reasons why contenders have none. Raises BatonError,
    PeerMissing."""
    doors: dict[str, tuple[str, Dialect]] = {}
    missing: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for name, options in baton_options(str(checkpoint(model, "bfloat16")), bounds).items():
            cluster = await stack.enter_async_context(Cluster(options))
            doors[f"baton, {name}"] = cluster.http_address, COMPLETIONS
        doors[AGAIN] = doors[TWICE]
        for peer, made in _PEERS.items():
            for chunk in CHUNKS[peer]:
                name = f"{peer}, chunks of {chunk:,}"
                try:
                    server = made(model, chunk, bounds, free_port())
                    address = await stack.enter_async_context(running(server))
                    doors[name] = address, server.dialect
                except (PeerMissing, ContenderFailed) as error:
                    missing[name] = str(error)
        return await _by_turns(doors, rates, load), missing


async def _by_turns(
    doors: Mapping[str, tuple[str, Dialect]], rates: Sequence[float], load: Load
) -> dict[tuple[str, float], Sequence[Record]]:
    found: dict[tuple[str, float], Sequence[Record]] = {}
    for run in runs_of(tuple(doors), rates, 1):
        rate, (address, dialect) = run.rate or 0.0, doors[run.target]
        records: Sequence[Record] = ()
        for seed, number in (("before", load.num_before), ("counted", load.num_requests)):
            requests = load.requests(rate, seed, number, _VOCAB_SIZE)
            records = await drive_http(address, requests, secrets.token_hex(8), dialect)
        found[run.target, rate] = records
        failed = sum(not record.is_complete for record in records)
        sys.stderr.write(f"{run.target} at {rate:g}/s: {failed} of {len(records)} failed\n")
    return found


def runs_data(
    found: Mapping[tuple[str, float], Sequence[Record]], slo: Slo
) -> list[dict[str, Any]]:
    """One entry for each run, by rate."""
    entries = []
    for (contender, rate), records in sorted(found.items(), key=lambda item: item[0][1]):
        summary = summarise(records, slo)
        inside = summary.slo_attainment * summary.num_requests
        entries.append(
            {
                "contender": contender,
                "rate": rate,
                "goodput_per_s": inside / summary.duration_s,
                "summary": asdict(summary),
            }
        )
    return entries


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=NAMES, default="125m")
    parser.add_argument("--rate", nargs="+", type=float, default=[1.0, 4.0])
    parser.add_argument("--num-requests", type=int, default=24)
    parser.add_argument("--before", type=int, default=8)
    parser.add_argument("--ttft-slo-ms", type=float, default=1500.0)
    parser.add_argument("--tpot-slo-ms", type=float, default=100.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    started = now()
    bounds = Bounds(given.threads, _MAX_MODEL_LEN, _MAX_NUM_SEQS, _KV_BYTES)
    load = Load(given.num_requests, given.before, _INPUT_SCALE)
    slo = Slo(given.ttft_slo_ms, given.tpot_slo_ms)
    try:
        found, missing = asyncio.run(measure(given.model, bounds, given.rate, load))
    except ChildFailed as error:
        raise SystemExit("\n".join((*error.last_lines, f"open_loop: {error}"))) from None
    except (BatonError, PeerMissing, OSError) as error:
        raise SystemExit(f"open_loop: {error}") from None
    data = {
        "model": given.model,
        "slo": asdict(slo),
        "load": asdict(load),
        "bounds": asdict(bounds),
        "runs": runs_data(found, slo),
        "missing": missing,
    }
    document = document_of("bench.peers.open_loop", started, data)
    document["versions"] |= peer_versions()
    publish(document, given.json, served_table)


if __name__ == "__main__":
    main()
