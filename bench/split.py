"""Two tiers against one, where long prompts come in bursts among answers that are being written.

    python -m bench.split [MODEL] [--trace FILE]
        [--oracle-step-ms N --oracle-token-us N] [--json FILE]

MODEL is a folder, or a name of bench/peers/models.py. With --oracle-step-ms or --oracle-token-us
engines compute nothing: their steps take the time given, and no core, so that what is measured is
the schedule and not the cores that workers share.

Three clusters of two workers take turns with the same requests: split (one prefill, one decode
worker); colocated (both do both, with as large chunks of prompts as by default); and
colocated-tuned, with chunks of --tuned-tokens, the fair rival. Shown are the gaps in the steady
answers (ITL), the time to the first token of the long prompts, and the highest rate of them at
which the share --slo-attainment of all requests is inside the SLO. See bench/README.md.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Annotated, cast

import typer

from baton.client import AsyncClient
from baton.config import ServeOptions
from baton.config.load import load_options
from baton.errors import BatonError
from baton.supervisor import ChildFailed
from bench.drive import COLOCATED, NUM_WARM_UP, DriveOptions, cluster_options, drive, started
from bench.machine import document_of, now, publish
from bench.measure import Distribution, Record, Slo, distribution, goodputs_of
from bench.peers.models import NAMES, checkpoint
from bench.plan import LoadOptions, burst, entries_of, runs_of
from bench.suite.split_tables import split_table
from bench.workload import LoadRequest, requests_of
from engine.plan.trace import TraceEntry, TraceError

TUNED = "colocated-tuned"

#: Options of all clusters. Drafts are off, so that every piece of an answer is one step.
BASE_SETTINGS: Mapping[str, object] = MappingProxyType(
    {
        "speculative_method": "none",
        # All clusters run at once: none may take most of the memory.
        "gpu_memory_utilization": 0.1,
        "max_num_seqs": 64,
    }
)


@dataclass(frozen=True, slots=True)
class Steady:
    """Requests with short prompts at equal intervals. rate: requests/s."""

    rate: float = 4.0
    num_input_tokens: int = 64
    num_output_tokens: int = 256


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """steady, bursts: in order of time; the two overlap."""

    steady: tuple[LoadRequest, ...]
    bursts: tuple[LoadRequest, ...]


@dataclass(frozen=True, slots=True)
class MixedSummary:
    """Latencies in milliseconds. itl_ms, tpot_ms: of the steady requests. attainment: share of all
    requests that complete inside the SLO."""

    num_steady: int
    num_bursts: int
    num_failed: int
    itl_ms: Distribution
    tpot_ms: Distribution
    steady_ttft_ms: Distribution
    burst_ttft_ms: Distribution
    attainment: float


def mixed_load(
    steady: Steady,
    long_entries: Sequence[TraceEntry],
    rate: float,
    burst_size: int,
    vocab_size: int,
    seed: int,
) -> MixedLoad:
    """Long prompts at a mean of `rate` requests/s, for the length of the run; steady requests from
    before the first of them until after the last. Raises ArrivalsError."""
    lead_s = 2 / steady.rate
    rng = Random(f"{seed}/bursts/{rate}")
    times = [lead_s + time_s for time_s in burst(len(long_entries), rate, burst_size, rng)]
    num_steady = max(2, round((times[-1] + lead_s) * steady.rate))
    entry = TraceEntry(0.0, steady.num_input_tokens, steady.num_output_tokens)
    even = [index / steady.rate for index in range(num_steady)]
    return MixedLoad(
        requests_of([entry] * num_steady, even, vocab_size, seed),
        requests_of(long_entries, times, vocab_size, seed + 1),
    )


def summarise_mixed(steady: Sequence[Record], bursts: Sequence[Record], slo: Slo) -> MixedSummary:
    """Summarise one run's records. Raises ValueError if there are none."""
    records = (*steady, *bursts)
    if not records:
        raise ValueError("no request was made")
    written = [record for record in steady if record.is_complete]
    return MixedSummary(
        num_steady=len(steady),
        num_bursts=len(bursts),
        num_failed=sum(not record.is_complete for record in records),
        itl_ms=distribution(gap for record in written for gap in record.itl_ms),
        tpot_ms=distribution(r.tpot_ms for r in written if r.tpot_ms is not None),
        steady_ttft_ms=distribution(r.ttft_ms for r in written if r.ttft_ms is not None),
        burst_ttft_ms=distribution(
            r.ttft_ms for r in bursts if r.is_complete and r.ttft_ms is not None
        ),
        attainment=sum(slo.is_met_by(record) for record in records) / len(records),
    )


@dataclass(frozen=True, slots=True)
class Point:
    """One run. rate: long prompts per second."""

    target: str
    rate: float
    repetition: int
    summary: MixedSummary


@dataclass(frozen=True, slots=True)
class Comparison:
    """One call of the program. wanted: minimum share of requests inside the SLO."""

    steady: Steady
    long: LoadOptions
    rates: tuple[float, ...]
    seconds: float
    slo: Slo
    wanted: float


def clusters_of(
    model: str, tuned_tokens: int, settings: Mapping[str, object]
) -> dict[str, ServeOptions]:
    """Clusters to compare, by name. settings: options of all. Raises ConfigError."""
    base = {**BASE_SETTINGS, **settings}
    # A step must have room for one token per sequence.
    base["max_num_seqs"] = min(cast("int", base["max_num_seqs"]), tuned_tokens)
    clusters = cluster_options(model, base, compares=True)
    given = clusters[COLOCATED].model_dump(exclude_unset=True)
    return {
        **clusters,
        TUNED: load_options(ServeOptions, {**given, "max_num_batched_tokens": tuned_tokens}),
    }


async def compare(
    comparison: Comparison, clusters: Mapping[str, ServeOptions]
) -> tuple[Point, ...]:
    """Run every rate on every target; targets take turns. Raises BatonError, TraceError."""
    points: list[Point] = []
    async with started(clusters) as clients:
        model = await next(iter(clients.values())).model()
        entries = entries_of(comparison.long, model.max_model_len)
        rates = comparison.rates
        runs = runs_of(tuple(clients), rates, 1)
        for client in clients.values():
            await _warm_up(client, _load(comparison, entries, rates[0], model.vocab_size))
        for run in runs:
            rate = run.rate or 0.0
            load = _load(comparison, entries, rate, model.vocab_size)
            summary = await _measure(clients[run.target], load, comparison.slo)
            points.append(Point(run.target, rate, run.repetition, summary))
            sys.stderr.write(f"{run.target} at {rate:g}/s: ITL p99 {summary.itl_ms.p99:.0f} ms\n")
    return tuple(points)


def _load(
    comparison: Comparison, entries: Sequence[TraceEntry], rate: float, vocab_size: int
) -> MixedLoad:
    long = comparison.long
    num_long = max(long.burst_size, round(comparison.seconds * rate))
    some = [entries[index % len(entries)] for index in range(num_long)]
    return mixed_load(comparison.steady, some, rate, long.burst_size, vocab_size, long.seed)


async def _warm_up(client: AsyncClient, load: MixedLoad) -> None:
    """A few unmeasured sequential requests, from which workers learn their costs."""
    for request in (*load.steady[:NUM_WARM_UP], *load.bursts[:NUM_WARM_UP]):
        await drive(client, (dataclasses.replace(request, due_s=0.0),), _run_options())


async def _measure(client: AsyncClient, load: MixedLoad, slo: Slo) -> MixedSummary:
    records = await drive(client, (*load.steady, *load.bursts), _run_options())
    num_steady = len(load.steady)
    return summarise_mixed(records[:num_steady], records[num_steady:], slo)


def _run_options() -> DriveOptions:
    """A new salt per run, so that no run hits prefixes cached by an earlier one."""
    return DriveOptions(cache_salt=secrets.token_hex(8), timeout_s=120.0)


def _engine_settings(step_ms: float, token_us: float) -> dict[str, object]:
    """Options of an engine that takes time and computes nothing; empty without times."""
    if not step_ms and not token_us:
        return {}
    return {"engine": "oracle", "oracle_step_ms": step_ms, "oracle_token_us": token_us}


def main(
    model: Annotated[str, typer.Argument(metavar="[MODEL]")] = "box",
    trace: Annotated[
        Path | None, typer.Option(help="File of lengths of the long prompts, .csv or .jsonl.")
    ] = None,
    input_scale: Annotated[float, typer.Option(help="Factor on the trace's prompts.")] = 1.0,
    output_scale: Annotated[float, typer.Option(help="Factor on the trace's answers.")] = 0.05,
    long_tokens: Annotated[
        int, typer.Option(min=1, help="Mean length of the long prompts, without a trace.")
    ] = 1200,
    rate: Annotated[
        list[float] | None, typer.Option(help="Long prompts/s; may be repeated. [default: 1, 2, 4]")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of bursts, in each run.")] = 10.0,
    burst_size: Annotated[int, typer.Option(min=1, help="Long prompts that come at once.")] = 4,
    steady_rate: Annotated[float, typer.Option(help="Short requests/s.")] = 3.0,
    steady_output_tokens: Annotated[int, typer.Option(min=2, help="Of a short request.")] = 256,
    tuned_tokens: Annotated[
        int, typer.Option(min=1, help="--max-num-batched-tokens of the tuned rival.")
    ] = 64,
    oracle_step_ms: Annotated[float, typer.Option(min=0, help="Of each step.")] = 0.0,
    oracle_token_us: Annotated[float, typer.Option(min=0, help="Of each new token.")] = 0.0,
    ttft_slo_ms: Annotated[float, typer.Option(help="Longest time to first token.")] = 1500.0,
    tpot_slo_ms: Annotated[float, typer.Option(help="Longest mean time per later token.")] = 30.0,
    slo_attainment: Annotated[float, typer.Option(min=0, max=1)] = 0.9,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all results.")] = None,
) -> None:
    """Measure two tiers beside one, with default and with small prompt chunks."""
    comparison = Comparison(
        Steady(rate=steady_rate, num_output_tokens=steady_output_tokens),
        LoadOptions(
            num_requests=64,
            num_input_tokens=long_tokens,
            num_output_tokens=12,
            burst_size=burst_size,
            trace=trace,
            input_scale=input_scale if trace else 1.0,
            output_scale=output_scale if trace else 1.0,
        ),
        tuple(rate or (1.0, 2.0, 4.0)),
        seconds,
        Slo(ttft_slo_ms, tpot_slo_ms),
        slo_attainment,
    )
    started_at = now()
    folder = str(checkpoint(model, "bfloat16")) if model in NAMES else model
    settings = _engine_settings(oracle_step_ms, oracle_token_us)
    try:
        clusters = clusters_of(folder, tuned_tokens, settings)
        points = asyncio.run(compare(comparison, clusters))
    except ChildFailed as error:
        raise SystemExit("\n".join((*error.last_lines, f"split: {error}"))) from None
    except (BatonError, TraceError, OSError) as error:
        raise SystemExit(f"split: {error}") from None
    long = {**dataclasses.asdict(comparison.long), "trace": trace.name if trace else ""}
    data = {
        "model": model,
        "engine": {"step_ms": oracle_step_ms, "token_us": oracle_token_us},
        "chunk_tokens": {
            name: options.max_num_batched_tokens
            for name, options in clusters.items()
            if options.colocated
        },
        "tuned_tokens": tuned_tokens,
        "comparison": {**dataclasses.asdict(comparison), "long": long},
        "goodput_long_prompts_per_s": goodputs_of(
            [(p.target, p.rate, p.summary.attainment) for p in points], slo_attainment
        ),
        "points": [dataclasses.asdict(point) for point in points],
    }
    publish(document_of("bench.split", started_at, data), json_path, split_table)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="python -m bench.split")
