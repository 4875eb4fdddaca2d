"""Overload of real processes: goodput, time to refusal, accuracy of retry advice, and effect on
others.

    python -m bench.overload [MODEL] [--set NAME=VALUE ...] [--times 1 --times 10 ...] [--json FILE]

First the capacity: twice as many clients as there are places, each with one request at a time. Then
an open loop at each multiple of the capacity, all requests with the same deadline. Goodput is the
rate of answers complete by their deadlines, without those in the first deadline after the start,
while the queue fills.

After the last load, requests with shorter deadlines are sent until one is answered; the advice is
that of the first refusal. Finally single requests are sent beside many long ones of another client,
and beside one that needs all places while one is taken.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.client import AsyncClient, SamplingParams
from baton.errors import BatonError, DeadlineExceeded, Overloaded
from baton.supervisor import ChildFailed
from bench.drive import DriveOptions, cluster_options, drive, meanwhile, started
from bench.load import settings_of
from bench.machine import BUNDLED_MODEL, document_of, now, publish
from bench.measure import Record, distribution
from bench.plan import LoadOptions, Run, entries_of, load_of
from bench.suite.markdown import about, number, table
from bench.workload import LoadRequest

#: Goals: goodput at the highest load as a share of its peak, maximum refusal time, and maximum
#: ratio of advice to actual wait.
MIN_KEPT, MAX_REFUSAL_MS, MAX_OFF = 0.9, 50.0, 2.0

_REFUSED = Overloaded.reason
#: Closed loop: seconds before counting starts, and seconds of counting.
_SETTLE_S, _CLOSED_S = 5.0, 10.0
#: Deadlines of probes while the queue shrinks, as shares of the normal one.
_PROBED_SHARES = (0.8, 0.6, 0.4)
#: Interval of repeated probes, as a share of the advice.
_PROBE_SHARE = 0.125
_NUM_LONG, _NUM_ALONE, _NUM_BESIDE = 500, 20, 20
_POLITE_TOKENS, _WIDE_CHOICES = 16, 16


@dataclass(frozen=True, slots=True)
class Level:
    """One load. times: multiple of the capacity; rate: requests/s. late: by reason, requests
    neither answered nor refused in time. Times in milliseconds; refusals from sent to refused."""

    times: float
    rate: float
    num_requests: int
    goodput: float
    num_answered: int
    num_refused: int
    refusal_p50_ms: float
    refusal_p99_ms: float
    refusal_max_ms: float
    lag_p99_ms: float
    late: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Advice:
    """advice_s: retry advice of the first refusal with this deadline; taken_s: time from it to the
    sending of the first answered request."""

    timeout_s: float
    advice_s: float
    taken_s: float


@dataclass(frozen=True, slots=True)
class Beside:
    """Time to first token of polite requests beside other load."""

    what: str
    ttft_p50_ms: float
    ttft_max_ms: float


def level_of(times: float, rate: float, timeout_s: float, records: Sequence[Record]) -> Level:
    """Classify a load's requests. timeout_s: deadline of each."""
    end_s = records[-1].due_s
    good = [record for record in records if record.is_complete]
    settled = [record for record in good if timeout_s <= record.end_s <= end_s]
    refused = [record for record in records if record.error == _REFUSED]
    late: dict[str, int] = {}
    for record in records:
        if not record.is_complete and record.error != _REFUSED:
            late[record.error] = late.get(record.error, 0) + 1
    refusals = distribution((record.end_s - record.sent_s) * 1e3 for record in refused)
    lag = distribution((record.sent_s - record.due_s) * 1e3 for record in records)
    goodput = len(settled) / (end_s - timeout_s)
    return Level(
        times,
        rate,
        len(records),
        goodput,
        len(good),
        len(refused),
        refusals.p50,
        refusals.p99,
        refusals.max,
        lag.p99,
        late,
    )


async def capacity_of(
    client: AsyncClient, requests: Sequence[LoadRequest], num_clients: int
) -> float:
    """Answers per second of num_clients clients in a closed loop."""
    loop = asyncio.get_running_loop()
    begin_s, ends_s = loop.time() + _SETTLE_S, list[float]()
    source = itertools.cycle(requests)

    async def keep_asking() -> None:
        while loop.time() < begin_s + _CLOSED_S:
            (record,) = await drive(client, (_at_once(next(source)),), DriveOptions())
            if record.error:
                raise SystemExit(f"overload: a request of the closed loop failed: {record.error}")
            ends_s.append(loop.time())

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(keep_asking())
    return sum(begin_s <= end_s <= begin_s + _CLOSED_S for end_s in ends_s) / _CLOSED_S


async def advice_of(
    client: AsyncClient, request: LoadRequest, salt: str, timeout_s: float
) -> Advice | None:
    """Retry until answered; None if the first request is not refused. salt: the same as of the
    others, for one common account."""
    loop = asyncio.get_running_loop()
    options = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True)
    advice_s: float | None = None
    refused_s = loop.time()
    while True:
        sent_s = loop.time()
        try:
            await client.generate(
                request.prompt_token_ids, options, cache_salt=salt, timeout_s=timeout_s
            )
        except Overloaded as refusal:
            if advice_s is None:
                advice_s, refused_s = refusal.retry_after_s or 0.0, loop.time()
            await asyncio.sleep(_PROBE_SHARE * advice_s)
        except DeadlineExceeded:
            pass  # accepted before the queue was full
        else:
            return Advice(timeout_s, advice_s, sent_s - refused_s) if advice_s else None


async def polite(client: AsyncClient, request: LoadRequest, what: str, num_requests: int) -> Beside:
    """Short requests of one client, one after the other."""
    short = dataclasses.replace(_at_once(request), num_output_tokens=_POLITE_TOKENS)
    options = DriveOptions(cache_salt="polite")
    times_ms = []
    for _ in range(num_requests):
        (record,) = await drive(client, (short,), options)
        if record.ttft_ms is None:
            raise SystemExit(f"overload: a polite request failed: {record.error}")
        times_ms.append(record.ttft_ms)
    found = distribution(times_ms)
    return Beside(what, found.p50, found.max)


async def fairness(
    client: AsyncClient, requests: Sequence[LoadRequest], num_tokens: int
) -> tuple[Beside, ...]:
    """A polite client alone, and beside others. num_tokens: mean output length."""
    request = dataclasses.replace(_at_once(requests[0]), num_output_tokens=num_tokens)
    alone = await polite(client, request, "nobody", _NUM_ALONE)
    many = [*map(_at_once, itertools.islice(itertools.cycle(requests), _NUM_LONG))]
    async with meanwhile(drive(client, many, DriveOptions(cache_salt="many"))):
        what = f"{_NUM_LONG} requests for {num_tokens} tokens in the mean, of one client"
        beside_many = await polite(client, request, what, _NUM_BESIDE)
    long = dataclasses.replace(request, num_output_tokens=4 * num_tokens)
    wide = SamplingParams(max_tokens=num_tokens, n=_WIDE_CHOICES, temperature=1.0, ignore_eos=True)
    async with meanwhile(
        drive(client, [long], DriveOptions(cache_salt="long")),
        client.generate(request.prompt_token_ids, wide, cache_salt="wide"),
    ):
        what = f"{_WIDE_CHOICES} choices that wait for one place of {_WIDE_CHOICES}"
        beside_wide = await polite(client, request, what, _NUM_BESIDE)
    return alone, beside_many, beside_wide


def _at_once(request: LoadRequest) -> LoadRequest:
    return dataclasses.replace(request, due_s=0.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """load: of each level, except its number of requests. for_s: seconds per level."""

    load: LoadOptions
    times: tuple[float, ...]
    for_s: float
    timeout_s: float
    num_places: int


async def measure(client: AsyncClient, plan: Plan) -> dict[str, Any]:
    """Measure everything; returns plain values."""
    model = await client.model()

    def requests_at(rate: float, for_s: float) -> tuple[LoadRequest, ...]:
        load = dataclasses.replace(plan.load, num_requests=max(2, round(rate * for_s)))
        entries = entries_of(load, model.max_model_len)
        return load_of(load, entries, Run("", rate, 0), model.vocab_size)[0]

    some = requests_at(64.0, 1.0)
    capacity = await capacity_of(client, some, 2 * plan.num_places)
    levels: list[Level] = []
    probes: list[Advice | None] = []
    num_tokens = plan.load.num_output_tokens
    mean = dataclasses.replace(some[0], num_output_tokens=num_tokens)

    async def probe(salt: str) -> None:
        await asyncio.sleep(plan.for_s)
        timeouts_s = [share * plan.timeout_s for share in _PROBED_SHARES]
        asked = (advice_of(client, mean, salt, timeout_s) for timeout_s in timeouts_s)
        probes.extend(await asyncio.gather(*asked))

    for times in plan.times:
        rate = times * capacity
        options = DriveOptions(cache_salt=secrets.token_hex(8), timeout_s=plan.timeout_s)
        requests = requests_at(rate, plan.for_s)
        gc.collect()
        gc.freeze()  # a collection would pause this process for up to 90 ms, and delay refusals
        async with asyncio.TaskGroup() as group:
            if times == plan.times[-1]:
                group.create_task(probe(options.cache_salt))
            records = await drive(client, requests, options)
        levels.append(level_of(times, rate, plan.timeout_s, records))
        typer.echo(f"{levels[-1]}", err=True)
    return {
        "capacity": capacity,
        "timeout_s": plan.timeout_s,
        "num_places": plan.num_places,
        "levels": [asdict(level) for level in levels],
        "advice": [asdict(each) for each in probes if each],
        "fairness": [asdict(each) for each in await fairness(client, some, num_tokens)],
    }


def markdown(document: Mapping[str, Any]) -> str:
    """Markdown: settings, machine and tables."""
    peak = max(level["goodput"] for level in document["levels"])
    levels = [
        [
            f"{level['times']:g}",
            number(level["rate"]),
            f"{level['num_requests']:,}",
            number(level["goodput"]),
            f"{level['goodput'] / peak:.0%}",
            f"{level['num_answered']:,}",
            f"{level['num_refused']:,}",
            f"{number(level['refusal_p50_ms'])} / {number(level['refusal_p99_ms'])} / "
            f"{number(level['refusal_max_ms'])}",
            ", ".join(f"{n} {why}" for why, n in level["late"].items()) or "0",
        ]
        for level in document["levels"]
    ]
    headings = ("Times", "requests/s", "Sent", "Goodput/s", "of its peak", "Answered", "Refused")
    found = table((*headings, "refused after, ms, p50 / p99 / longest", "Late"), levels)
    advice = [
        [
            number(each["timeout_s"]),
            number(each["advice_s"]),
            number(each["taken_s"]),
            _goal(1 / MAX_OFF <= each["advice_s"] / max(each["taken_s"], 1e-3) <= MAX_OFF),
        ]
        for each in document["advice"]
    ]
    beside = [
        [each["what"], number(each["ttft_p50_ms"]), number(each["ttft_max_ms"])]
        for each in document["fairness"]
    ]
    last = document["levels"][-1]
    goals = (
        f"Goodput at {last['times']:g} times the capacity, {MIN_KEPT:.0%} of its peak: "
        f"{_goal(last['goodput'] >= MIN_KEPT * peak)}. Refusals' p99 at most "
        f"{MAX_REFUSAL_MS:g} ms: {_goal(last['refusal_p99_ms'] <= MAX_REFUSAL_MS)}."
    )
    what = (
        f"Capacity {number(document['capacity'])} answers/s at {document['num_places']} places; "
        f"deadlines of {document['timeout_s']:g} s."
    )
    return "\n\n".join(
        (
            f"{about(document)} {what}",
            found,
            goals,
            table(("Time left, s", "RetryInfo, s", "taken after, s", "within 2 times"), advice),
            table(("Beside", "first token, ms, p50", "longest"), beside),
        )
    )


def _goal(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


async def _run(model: str, settings: Mapping[str, object], plan: Plan) -> dict[str, Any]:
    clusters = cluster_options(model, settings, compares=False)
    async with started(clusters) as clients:
        (client,) = clients.values()
        return await measure(client, plan)


def main(
    model: Annotated[str, typer.Argument(metavar="[MODEL]")] = BUNDLED_MODEL,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Option of `baton serve`."),
    ] = None,
    times: Annotated[
        list[float] | None,
        typer.Option(help="Of the capacity; may be repeated. [default: 1, 2, 5, 10]"),
    ] = None,
    for_s: Annotated[float, typer.Option(help="How long each load lasts.")] = 40.0,
    timeout_s: Annotated[float, typer.Option(help="Deadline of each request.")] = 10.0,
    places: Annotated[int, typer.Option(min=16, help="Places of the decode worker.")] = 16,
    input_tokens: Annotated[int, typer.Option(min=1, help="Mean length of prompts.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=16, help="Mean length of answers.")] = 256,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all results.")] = None,
) -> None:
    """Measure goodput under overload."""
    if for_s <= timeout_s:
        raise typer.BadParameter("--for-s: give more than --timeout-s, for what is counted later")
    started_at = now()
    load = LoadOptions(num_input_tokens=input_tokens, num_output_tokens=output_tokens)
    plan = Plan(load, tuple(sorted(times or (1, 2, 5, 10))), for_s, timeout_s, places)
    settings = {"max_num_seqs": places, **settings_of(set_ or ())}
    try:
        data = asyncio.run(_run(model, settings, plan))
        publish(document_of("bench.overload", started_at, data), json_path, markdown)
    except ChildFailed as error:
        raise SystemExit("\n".join((*error.last_lines, f"overload: {error}"))) from None
    except (BatonError, OSError) as error:
        raise SystemExit(f"overload: {error}") from None


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="python -m bench.overload")
