"""Faults of workers of several hosts, on hosts made of network namespaces, under streams of every
kind.

    python -m bench.nodes [--only TEXT] [--num-rounds 1] [--kv-transport tcp] [--json FILE]
        [--write] [MODEL]

Seven hosts with their own addresses and loopback, joined by veth and limited by tc's tbf: two for a
prefill worker, two for a decode worker, one for a decode worker of its own, one for Redis, one for
the gateway. Packets between the hosts of a worker, and between the tiers, go through a wire that
loses and delays them. Streams of known output run all the time, while ranks and hosts are killed,
frozen and unplugged, and wires fail. Each stream has to have every token once, in order and
right, and in the end no block may be held. A worker that is hit has to end within 3 s: host 0 of
it, which serves, or the other host where host 0 was hit. --write: renews the table of
docs/reliability.md.

Needs Linux, iproute2, util-linux, a redis-server, and root or the right to make namespaces.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baton.check.fault_load import until_healed
from baton.check.faults import MAX_RETRIES, FaultVerdict, known_requests, run_faults
from baton.check.process_faults import Fault
from baton.cli.check import report_faults
from baton.client import AsyncClient
from bench.machine import BUNDLED_MODEL, ROOT, document_of, now, publish
from bench.namespaces import begin_inside, run_inside
from bench.node_faults import FAULTS, SiteTarget
from bench.node_site import SiteOptions, site_of
from bench.suite.markdown import about, replaced, table

PAGE = ROOT / "docs" / "reliability.md"
#: A worker that has lost a rank, or a host, ends within so many seconds.
MAX_END_S = 3.0
#: Seconds until all workers are ready for the first time; later the logs of hosts say why not.
READY_S = 600.0


async def run(
    options: SiteOptions, faults: Sequence[Fault[SiteTarget]], arguments: argparse.Namespace
) -> tuple[FaultVerdict, dict[str, float | None]]:
    """The verdict, and the seconds in which each fault ended its worker."""
    own = {"model": options.model, "dtype": "float32", "log_level": "error"}
    own["kv_cache_memory_bytes"] = options.kv_memory
    known = await known_requests(own, arguments.num_requests, arguments.seed, arguments.max_tokens)
    async with (
        site_of(options) as site,
        AsyncClient(site.address, max_retries=MAX_RETRIES) as client,
    ):
        begin_s = time.monotonic()
        async with asyncio.timeout(READY_S):
            await until_healed(site.num_workers, client)
        print(
            f"{site.num_workers} workers ready after {time.monotonic() - begin_s:.0f} s", flush=True
        )
        target = SiteTarget(site)

        def on_fault(fault: str, num_streams: int) -> None:
            after = f", ended after {_seconds(target.ended_after_s.get(fault))}"
            print(f"{fault}{after}: {num_streams} streams faulted so far", flush=True)

        verdict = await run_faults(
            known,
            client,
            faults,
            lambda _: target,
            is_enough=lambda done, _: done >= arguments.num_rounds,
            concurrency=arguments.concurrency,
            seed=arguments.seed,
            on_fault=on_fault,
        )
    return verdict, target.ended_after_s


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table_of(document: Mapping[str, Any]) -> str:
    """Markdown: one line per fault, and sums."""
    headings = ("Fault", "Ends its worker, s", "Streams", "Resumed", "Errors", "Wrong")
    rows = []
    for found in document["faults"]:
        counts = ("num_streams", "num_resumed", "num_errors", "num_wrong")
        gaps = (found["gap_p50_s"], found["longest_s"])
        ended = _seconds(document["ended_after_s"].get(found["fault"]))
        rows.append(
            [found["fault"], ended, *(str(found[key]) for key in counts), *map(_seconds, gaps)]
        )
    lines = table((*headings, "Gap p50, s", "Longest, s"), rows)
    ends = [seconds for seconds in document["ended_after_s"].values() if seconds is not None]
    total = (
        f"{document['num_streams']} streams, {document['num_leaked_blocks']} blocks held at the "
        f"end. Workers that were hit ended after {_seconds(max(ends, default=None))} s at most."
    )
    return "\n\n".join((about(document), lines, total))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", nargs="?", default=str(BUNDLED_MODEL), metavar="MODEL")
    parser.add_argument("--only", action="append", help="faults that have this in their names")
    parser.add_argument("--num-rounds", type=int, default=1)
    parser.add_argument("--num-requests", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kv-transport", default="tcp")
    parser.add_argument("--prefill-cut", choices=("tensor", "pipeline"), default="tensor")
    parser.add_argument("--decode-cut", choices=("tensor", "pipeline"), default="pipeline")
    parser.add_argument("--rate", default="1gbit", help="of each host, as tc writes it")
    parser.add_argument("--log-dir", type=Path, help="keep the logs of all hosts there")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--is-inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    faults = [
        fault for fault in FAULTS if any(text in fault.name for text in arguments.only or ("",))
    ]
    if not faults:
        parser.error(f"--only={arguments.only}: no fault has this in its name")
    if not arguments.is_inside:
        return run_inside("bench.nodes")
    sys.argv.remove("--is-inside")  # the command for people, which a document shows
    begin_inside()
    started = now()
    with tempfile.TemporaryDirectory() as scratch:
        log_dir = arguments.log_dir or Path(scratch)
        log_dir.mkdir(parents=True, exist_ok=True)
        options = SiteOptions(
            *(arguments.model, log_dir, arguments.kv_transport),
            *(arguments.prefill_cut, arguments.decode_cut, arguments.rate),
        )
        verdict, ended = asyncio.run(run(options, faults, arguments))
    report_faults(verdict)
    data = {
        "faults": [asdict(each) for each in verdict.results],
        "ended_after_s": ended,
        "num_leaked_blocks": verdict.num_leaked_blocks,
        "num_streams": verdict.num_streams,
    }
    document = document_of("bench.nodes", started, data)
    publish(document, arguments.json, table_of)
    if arguments.write:
        PAGE.write_text(replaced(PAGE.read_text(), "node-faults", table_of(document)))
    late = [fault for fault, seconds in ended.items() if seconds is None or seconds > MAX_END_S]
    for fault in late:
        print(f"{fault}: the worker ended after {_seconds(ended[fault])} s, not {MAX_END_S:g}")
    return 0 if verdict.has_held and not late else 1


if __name__ == "__main__":
    sys.exit(main())
