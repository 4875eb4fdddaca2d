"""What one tenant's overload does to a polite client, at both doors, with and without API keys.

    python -m bench.one_tenant [MODEL] [--set NAME=VALUE ...] [--door grpc] [--json FILE]

Beside each load of the other tenant, short requests are sent one after the other. The loads:
nothing; many long requests at once; a request that waits for all places while they are taken; and
an open loop at a multiple of the capacity with deadlines. Without keys, tenants are told apart by
`cache_salt`.

In the open loop by gRPC, each second, a request of the overloading tenant is refused by its
deadline, and a twin without one is sent with it: the time in which the refusal expected the answer
is compared with the twin's. Refusals that tell no time are counted.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from baton.client import AsyncClient, SamplingParams
from baton.config import ServeOptions
from baton.config.load import load_options
from baton.errors import BatonError
from baton.supervisor import ChildFailed, Cluster
from bench.drive import meanwhile
from bench.load import settings_of
from bench.machine import BUNDLED_MODEL, document_of, now, publish
from bench.measure import distribution
from bench.suite.markdown import about, number, table

_PROMPT = tuple(range(10, 42))
_EXPECTED = re.compile(r"expected in ([0-9.]+) s")
#: Deadline, in seconds, of a request whose refusal is asked for.
_HOPELESS_S = 0.5


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. tenant: of two, `polite` and `other`. timeout_s: None for the server's own."""

    tenant: str
    num_tokens: int
    num_choices: int = 1
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """Seconds to the first piece, and to the end; error: its message, empty if there is none."""

    first_s: float
    end_s: float
    error: str = ""


class Door(Protocol):
    """One of the gateway's ports."""

    async def ask(self, asked: Asked) -> Answered: ...


class GrpcDoor:
    """By the SDK. keys: by tenant; empty without."""

    def __init__(self, address: str, keys: Mapping[str, str]) -> None:
        self._clients = {
            tenant: AsyncClient(address, api_key=keys.get(tenant), max_retries=0)
            for tenant in ("polite", "other")
        }

    async def ask(self, asked: Asked) -> Answered:
        loop = asyncio.get_running_loop()
        begin_s, first_s, error = loop.time(), 0.0, ""
        params = SamplingParams(
            max_tokens=asked.num_tokens,
            n=asked.num_choices,
            temperature=float(asked.num_choices > 1),
            ignore_eos=True,
        )
        try:
            async with self._clients[asked.tenant].stream(
                _PROMPT, params, cache_salt=asked.tenant, timeout_s=asked.timeout_s
            ) as stream:
                async for _ in stream:
                    first_s = first_s or loop.time() - begin_s
        except BatonError as failure:
            error = failure.message
        return Answered(first_s, loop.time() - begin_s, error)


class HttpDoor:
    """Each request over a connection of its own. It has no deadlines there: the client leaves."""

    def __init__(self, address: str, keys: Mapping[str, str]) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._keys = keys

    async def ask(self, asked: Asked) -> Answered:
        loop = asyncio.get_running_loop()
        begin_s, first_s = loop.time(), 0.0
        try:
            async with asyncio.timeout(asked.timeout_s), self._connected() as (reader, writer):
                writer.write(self._request(asked))
                head = await reader.readuntil(b"\r\n\r\n")
                piece = await reader.read(65_536)
                first_s, rest = loop.time() - begin_s, await reader.read()
        except TimeoutError:
            error = "gave up"
        except (OSError, EOFError) as failure:
            error = repr(failure)
        else:
            # A stream that fails after its begin says so in its last event.
            is_error = b" 200 " not in head.split(b"\r\n")[0] or b'"error"' in rest
            error = (piece + rest).decode(errors="replace") if is_error else ""
        return Answered(first_s, loop.time() - begin_s, error)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            yield reader, writer
        finally:
            writer.close()

    def _request(self, asked: Asked) -> bytes:
        body: dict[str, Any] = {
            "prompt": _PROMPT,
            "max_tokens": asked.num_tokens,
            "n": asked.num_choices,
            "temperature": int(asked.num_choices > 1),
            "ignore_eos": True,
            "stream": True,
            "cache_salt": asked.tenant,
        }
        data = json.dumps(body).encode()
        key = self._keys.get(asked.tenant)
        lines = [
            "POST /v1/completions HTTP/1.1",
            "host: bench",
            "connection: close",
            f"content-length: {len(data)}",
            *([f"authorization: Bearer {key}"] if key else []),
        ]
        return "\r\n".join((*lines, "", "")).encode() + data


DOORS: Mapping[str, Callable[[str, Mapping[str, str]], Door]] = {"grpc": GrpcDoor, "http": HttpDoor}


@dataclass(frozen=True, slots=True)
class Plan:
    """num_long: requests at once. long_tokens: of each. times: multiple of the capacity in the open
    loop, which lasts for_s, with deadlines of timeout_s."""

    num_places: int
    num_long: int
    long_tokens: int
    times: float
    for_s: float
    timeout_s: float
    num_polite: int
    polite_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """Polite requests beside a load; times to the first piece in ms."""

    door: str
    has_keys: bool
    beside: str
    p50_ms: float
    max_ms: float
    num_failed: int


@dataclass(slots=True)
class Estimates:
    """expected_s, took_s: of each refusal that told a time, and its twin. num_silent: that told
    none."""

    pairs: list[tuple[float, float]] = field(default_factory=list)
    num_silent: int = 0


async def polite(door: Door, plan: Plan) -> tuple[float, float, int]:
    answers = [await door.ask(Asked("polite", plan.polite_tokens)) for _ in range(plan.num_polite)]
    times = distribution(answer.first_s * 1e3 for answer in answers if not answer.error)
    return times.p50, times.max, sum(bool(answer.error) for answer in answers)


async def capacity_of(door: Door, plan: Plan) -> float:
    """Answers per second of twice as many clients as places, over three answers each."""
    loop = asyncio.get_running_loop()
    begin_s = loop.time()

    async def ask() -> None:
        for _ in range(3):
            await door.ask(Asked("other", plan.polite_tokens))

    await asyncio.gather(*(ask() for _ in range(2 * plan.num_places)))
    return 6 * plan.num_places / (loop.time() - begin_s)


async def open_loop(door: Door, plan: Plan, rate: float) -> None:
    """Requests of the other tenant, until cancelled."""
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(door.ask(Asked("other", plan.polite_tokens, 1, plan.timeout_s)))
            await asyncio.sleep(1 / rate)


async def estimates(door: Door, plan: Plan) -> Estimates:
    found = Estimates()

    async def one() -> None:
        refused, twin = await asyncio.gather(
            door.ask(Asked("other", plan.polite_tokens, 1, _HOPELESS_S)),
            door.ask(Asked("other", plan.polite_tokens)),
        )
        if twin.error or not refused.error or refused.error == "gave up":
            return
        if told := _EXPECTED.search(refused.error):
            found.pairs.append((float(told[1]), twin.end_s))
        else:
            found.num_silent += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(round(plan.for_s)):
            group.create_task(one())
            await asyncio.sleep(1.0)
    return found


async def measure(door: Door, plan: Plan, name: str, has_keys: bool) -> dict[str, Any]:
    """All rows of one door."""
    rows: list[Row] = []

    async def row(beside: str) -> None:
        rows.append(Row(name, has_keys, beside, *await polite(door, plan)))
        typer.echo(f"{rows[-1]}", err=True)

    capacity = await capacity_of(door, plan)
    await row("nobody")
    long = [door.ask(Asked("other", plan.long_tokens)) for _ in range(plan.num_long)]
    async with meanwhile(*long):
        await row(f"{plan.num_long} requests for {plan.long_tokens} tokens")
    wide = Asked("other", plan.polite_tokens, plan.num_places)
    async with meanwhile(door.ask(Asked("other", plan.long_tokens)), door.ask(wide)):
        await row(f"n = {plan.num_places}, which waits for the last of {plan.num_places} places")
    async with meanwhile(open_loop(door, plan, plan.times * capacity)):
        asked = asyncio.ensure_future(estimates(door, plan))
        await row(f"{plan.times:g} times the load, deadlines of {plan.timeout_s:g} s")
        found = await asked
    return {
        "rows": [asdict(each) for each in rows],
        "estimates": {"door": name, "has_keys": has_keys, "capacity": capacity, **asdict(found)},
    }


def markdown(document: Mapping[str, Any]) -> str:
    """Settings, machine and tables."""
    rows = [
        [
            each["door"],
            "yes" if each["has_keys"] else "no",
            each["beside"],
            number(each["p50_ms"]),
            number(each["max_ms"]),
            f"{each['num_failed']}",
        ]
        for part in document["parts"]
        for each in part["rows"]
    ]
    told = []
    for part in document["parts"]:
        each = part["estimates"]
        ratios = sorted(expected / took for expected, took in each["pairs"])
        within = sum(0.5 <= ratio <= 2 for ratio in ratios)
        span = f"{ratios[0]:.2f} to {ratios[-1]:.2f}" if ratios else ""
        keys = "yes" if each["has_keys"] else "no"
        told.append(
            [each["door"], keys, f"{within} of {len(ratios)}", span, str(each["num_silent"])]
        )
    headings = ("Door", "Keys", "Beside", "first token p50, ms", "longest", "failed")
    names = ("Door", "Keys", "within twice", "expected / took", "told none")
    return "\n\n".join((about(document), table(headings, rows), table(names, told)))


async def _run(model: str, settings: Mapping[str, object], plan: Plan, doors: Sequence[str]) -> Any:
    base = {"log_level": "error", "max_num_seqs": plan.num_places, **settings}
    parts = []
    for has_keys in (False, True):
        keys = {t: secrets.token_hex(8) for t in ("polite", "other")} if has_keys else {}
        given = {"api_key": tuple(keys.values())} if has_keys else {}
        options = load_options(ServeOptions, {**base, **given, "model": model, "port": 0})
        async with Cluster(options) as cluster:
            addresses = {"grpc": cluster.address, "http": cluster.http_address}
            for name in doors:
                door = DOORS[name](addresses[name], keys)
                parts.append(await measure(door, plan, name, has_keys))
    return {"parts": parts}


def main(
    model: Annotated[str, typer.Argument(metavar="[MODEL]")] = BUNDLED_MODEL,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Option of `baton serve`."),
    ] = None,
    door: Annotated[list[str] | None, typer.Option(help="grpc or http. [default: both]")] = None,
    places: Annotated[int, typer.Option(min=1, help="Places of the decode worker.")] = 16,
    num_long: Annotated[int, typer.Option(help="Long requests at once.")] = 500,
    long_tokens: Annotated[int, typer.Option(help="Tokens of each of those.")] = 256,
    times: Annotated[float, typer.Option(help="Open loop's rate, of the capacity.")] = 10.0,
    for_s: Annotated[float, typer.Option(help="How long the open loop is probed.")] = 15.0,
    timeout_s: Annotated[float, typer.Option(help="Deadline in the open loop.")] = 10.0,
    num_polite: Annotated[int, typer.Option(help="Polite requests beside each load.")] = 20,
    polite_tokens: Annotated[int, typer.Option(help="Tokens of each of those.")] = 16,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all results.")] = None,
) -> None:
    """Measure what one tenant's overload does to another."""
    plan = Plan(places, num_long, long_tokens, times, for_s, timeout_s, num_polite, polite_tokens)
    started_at = now()
    try:
        data = asyncio.run(_run(model, settings_of(set_ or ()), plan, door or tuple(DOORS)))
        publish(document_of("bench.one_tenant", started_at, data), json_path, markdown)
    except ChildFailed as error:
        raise SystemExit("\n".join((*error.last_lines, f"one_tenant: {error}"))) from None
    except (BatonError, OSError) as error:
        raise SystemExit(f"one_tenant: {error}") from None


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="python -m bench.one_tenant")
