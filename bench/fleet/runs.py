"""Loads from traces, and what a contender makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import fmean
from time import process_time

from baton.types import Slo
from bench.fleet.cluster import Answer, Cluster, Shape, serve
from bench.fleet.failures import Failure
from bench.fleet.worker import Hardware
from engine.plan.trace import TraceEntry
from tests.support.virtual_loop import run_virtual

#: Share of a run, from its start, that is not counted.
WARM_UP = 0.3
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Run:
    """A contender's shape under a load."""

    shape: Shape
    hardware: Hardware
    slo: Slo
    entries: Sequence[TraceEntry]
    seed: int = 0
    failures: Sequence[Failure] = ()
    num_gateways: int = 1


@dataclass(frozen=True, slots=True)
class Figures:
    """goodput: requests/s that arrive and end inside the targets. attainment: their share.
    refused_ms: longest time to a refusal. num_restarts: losses of workers and gateways that had a
    request. num_broken: requests that were begun and not finished. num_wrong: finished ones that
    have not each token once. cpu_s: of the simulation."""

    goodput: float
    attainment: float
    hit_share: float
    sent_bytes: int
    num_changes: int
    refused: float
    refused_ms: float
    worker_hours: float
    cpu_s: float
    num_requests: int = 0
    num_restarts: int = 0
    num_broken: int = 0
    num_wrong: int = 0


def served(run: Run) -> tuple[Cluster, list[Answer]]:
    """Simulate: the cluster at the end, and the answers in the order of the load."""

    async def main() -> tuple[Cluster, list[Answer]]:
        size = run.entries[0].block_tokens
        number = run.num_gateways
        cluster = Cluster(run.shape, run.hardware, run.slo, size, run.seed, num_gateways=number)
        cluster.expect(run.failures)
        answers = await serve(cluster, run.entries)
        await cluster.close()
        return cluster, answers

    return run_virtual(main(), max_time_s=10 * _DAY_S)


def figures_of(run: Run) -> Figures:
    """Simulate, and count."""
    began_s = process_time()
    cluster, answers = served(run)
    last_s = answers[-1].due_s
    first_s = answers[0].due_s + WARM_UP * (last_s - answers[0].due_s)
    counted = [answer for answer in answers if answer.due_s >= first_s]
    num_inside = sum(answer.is_inside(run.slo) for answer in counted)
    refused = [answer.refused_s for answer in counted if answer.refused_s is not None]
    return Figures(
        num_inside / (last_s - first_s),
        num_inside / len(counted),
        cluster.num_hit_tokens / max(1, cluster.num_prompt_tokens),
        cluster.num_sent_bytes,
        cluster.num_changes,
        len(refused) / len(counted),
        1e3 * max(refused, default=0.0),
        len(run.shape.policies) * last_s / 3600,
        process_time() - began_s,
        len(answers),
        sum(answer.num_restarts for answer in answers),
        sum(answer.is_broken for answer in answers),
        sum(answer.is_wrong for answer in answers),
    )


def capacity(
    entries: Sequence[TraceEntry], hardware: Hardware, num_workers: int, slo: Slo
) -> float:
    """Requests/s of a fleet that never waits, finds half of the prefixes that an endless cache
    would, and decodes in the largest batches within the target. A yardstick for load factors."""
    costs = hardware.costs
    most = hardware.max_num_seqs
    if slo.tpot_s is not None and costs.sequence_s:
        most = min(most, int((slo.tpot_s - costs.step_s) / costs.sequence_s))
    batch = max(1, most)
    token_s = (costs.step_s + costs.sequence_s * batch) / batch
    missing = fmean(
        entry.num_input_tokens - hit / 2 for entry, hit in zip(entries, hits(entries), strict=True)
    )
    output = fmean(entry.num_output_tokens for entry in entries)
    return num_workers / (missing * costs.token_s + output * token_s)


def hits(entries: Iterable[TraceEntry]) -> list[int]:
    """Tokens of each prompt that were in an earlier one."""
    seen: set[int] = set()
    found = []
    for entry in entries:
        number = next((i for i, n in enumerate(entry.hash_ids) if n not in seen), None)
        number = len(entry.hash_ids) if number is None else number
        seen.update(entry.hash_ids)
        found.append(min(number * entry.block_tokens, entry.num_input_tokens))
    return found


def load_in_turn(
    traces: Sequence[Sequence[TraceEntry]], rates: Sequence[float], seconds: float, seed: int
) -> list[TraceEntry]:
    """Traces one after another, each at its rate for `seconds`. One that comes again goes on
    elsewhere. Prompts of different traces share no prefixes."""
    if len(traces) == 1:
        return load_of(traces[0], rates[0], seconds, seed)
    different: list[Sequence[TraceEntry]] = []
    found = []
    for index, (trace, rate) in enumerate(zip(traces, rates, strict=True)):
        kind = next((i for i, other in enumerate(different) if other is trace), len(different))
        num_before = sum(other is trace for other in traces[:index])
        different += [trace] if kind == len(different) else []
        found += [
            replace(
                entry,
                arrival_s=index * seconds + entry.arrival_s,
                hash_ids=tuple(name * len(traces) + kind for name in entry.hash_ids),
            )
            for entry in load_of(trace, rate, seconds, seed + num_before)
            if entry.arrival_s < seconds
        ]
    return found


def load_of(
    trace: Sequence[TraceEntry], rate: float, seconds: float, seed: int
) -> list[TraceEntry]:
    """Requests of a trace in their order, repeated as need be with new prefixes, at a mean rate.
    seed: begins elsewhere in the trace."""
    number = max(2, round(rate * seconds))
    start = seed * len(trace) // 7 % len(trace)
    rounds = cycle(trace)
    span_s = (trace[-1].arrival_s - trace[0].arrival_s) * len(trace) / (len(trace) - 1)
    stretch = len(trace) / rate / span_s
    num_names = 1 + max((max(entry.hash_ids, default=0) for entry in trace), default=0)
    found = []
    for index, entry in enumerate(islice(rounds, start, start + number), start=start):
        turn = index // len(trace)
        at_s = (entry.arrival_s - trace[0].arrival_s + turn * span_s) * stretch
        names = tuple(name + turn * num_names for name in entry.hash_ids)
        found.append(replace(entry, arrival_s=at_s, hash_ids=names))
    begin_s = found[0].arrival_s
    return [replace(entry, arrival_s=entry.arrival_s - begin_s) for entry in found]
