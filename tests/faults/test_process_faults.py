"""Real processes, real signals: whatever dies or freezes, each stream has the oracle's tokens, each
exactly once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from baton.client import AsyncClient
from bench.fault_proxy import ProxiedCluster
from engine.oracle import OracleLayers
from gateway.request.assignment import MAX_FAILURES
from tests.support.broken_streams import merged, without_times
from tests.support.fault_streams import Streams, proxied_cluster, until_quiet
from tests.support.oracle_model import make_oracle_model
from tests.support.sse_streams import ChatStream, by_sse

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProxiedCluster]:
    """Two workers of each tier. The model's tokenizer has just the tokens of the engines, so that
    what they sample is text."""
    model = make_oracle_model(tmp_path_factory.mktemp("model"))
    async with proxied_cluster(2, 2, model=str(model)) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def singles() -> AsyncIterator[ProxiedCluster]:
    """One worker of each tier."""
    async with proxied_cluster(1, 1) as cluster:
        yield cluster


@asynccontextmanager
async def using(cluster: ProxiedCluster) -> AsyncIterator[AsyncClient]:
    """A client, and afterwards quiet."""
    async with AsyncClient(cluster.address, max_retries=0) as client:
        yield client
        await until_quiet(client, len(cluster.names) - 1)


def send(cluster: ProxiedCluster, signum: signal.Signals, *names: str) -> None:
    for name in names:
        os.kill(cluster.pid_of(name), signum)


async def cut_off(cluster: ProxiedCluster, client: AsyncClient) -> None:
    """Returns when the gateway has noticed that the decode worker cannot be reached. It stays so
    until it is let back."""
    link = cluster.links["decode-0"]
    link.refuse()
    link.cut()
    async with asyncio.timeout(60):
        while all(worker.state != "unreachable" for worker in (await client.model()).workers):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "victims",
    [
        ("decode-1", "prefill-1"),
        pytest.param(("decode-0",), marks=pytest.mark.long),
        pytest.param(("prefill-0",), marks=pytest.mark.long),
    ],
)
async def test_killed_workers_cost_no_stream_a_token(
    pairs: ProxiedCluster, victims: tuple[str, ...]
) -> None:
    async with using(pairs) as client:
        streams = Streams(client, seed=1, num_streams=16, num_tokens=100)
        await streams.all_run()
        send(pairs, signal.SIGKILL, *victims)
        assert not await streams.finish()
        if victims[0].startswith("decode"):
            assert streams.num_resumes


@pytest.mark.long
@pytest.mark.parametrize(
    "layers", [OracleLayers(40), OracleLayers(has_states=True)], ids=["groups", "states"]
)
async def test_nor_where_layers_have_windows_or_states_of_their_own(layers: OracleLayers) -> None:
    kinds = {"oracle_window": layers.window, "oracle_has_states": layers.has_states}
    async with proxied_cluster(1, 2, **kinds) as cluster, using(cluster) as client:
        has_slots = [worker.num_window_slots > 0 for worker in (await client.model()).workers]
        assert all(has_slots) if layers.window else not any(has_slots)
        streams = Streams(client, seed=5, num_streams=12, num_tokens=80, layers=layers)
        await streams.all_run()
        send(cluster, signal.SIGKILL, "decode-1")
        assert not await streams.finish()
        assert streams.num_resumes


@pytest.mark.parametrize(
    ("victims", "by_event_id"),
    [
        pytest.param(("decode-0",), False, marks=pytest.mark.long),
        pytest.param(("gateway",), False, marks=pytest.mark.long),
        (("gateway",), True),
    ],
)
async def test_kills_cost_no_stream_by_http_a_token(
    pairs: ProxiedCluster, victims: tuple[str, ...], by_event_id: bool
) -> None:
    async with using(pairs):
        source = by_sse(lambda: pairs.http_address, by_event_id=by_event_id)
        streams = Streams(source, seed=14, num_streams=12, num_tokens=100)
        await streams.all_run()
        send(pairs, signal.SIGKILL, *victims)
        assert not await streams.finish()


_TOOL = {"name": "f", "parameters": {"type": "object", "required": ["a"]}}
_ARGUMENTS = json.dumps({"a": "what is said to a tool " * 8})
_CALL = f'<tool_call>{{"name": "f", "arguments": {_ARGUMENTS}}}</tool_call>'
_TALK = [{"role": "user", "content": "x"}]
_CHATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": _TALK, "max_tokens": 100, "ignore_eos": True}),
    (
        "/v1/chat/completions",
        {
            "messages": _TALK,
            "tools": [{"type": "function", "function": _TOOL}],
            "structured_outputs": {
                "choice": [f"<think>{'Hm. ' * 20}</think>So.{_CALL}{_CALL}"],
                "enable_in_reasoning": True,
            },
            "max_tokens": 600,
        },
    ),
    (
        "/v1/responses",
        {
            "input": "x",
            "tools": [{"type": "function", **_TOOL}],
            "tool_choice": {"type": "function", "name": "f"},
            "max_output_tokens": 100,
        },
    ),
    (
        "/v1/messages",
        {
            "messages": _TALK,
            "tools": [{"name": "f", "input_schema": _TOOL["parameters"]}],
            "tool_choice": {"type": "tool", "name": "f"},
            "max_tokens": 100,
        },
    ),
)


@pytest.mark.parametrize(
    "victim", ["decode-0", "gateway", pytest.param("prefill-0", marks=pytest.mark.long)]
)
async def test_kills_change_no_answer_of_a_chat(pairs: ProxiedCluster, victim: str) -> None:
    """Texts, thoughts, calls and their names are those of answers that nothing befell."""
    async with using(pairs):

        def ask_all() -> list[ChatStream]:
            return [
                ChatStream(lambda: pairs.http_address, path, {**asked, "seed": seed})
                for path, asked in _CHATS
                for seed in (1, 2)
            ]

        async def answers_of(streams: list[ChatStream]) -> list[Any]:
            await asyncio.gather(*(stream.task for stream in streams))
            return [
                [
                    (str(key).replace(stream.request_id, "NAME"), text)
                    for key, text in without_times(merged(stream.events))
                ]
                for stream in streams
            ]

        undisturbed = await answers_of(ask_all())
        streams = ask_all()
        await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
        send(pairs, signal.SIGKILL, victim)
        assert await answers_of(streams) == undisturbed
        num_parts = {stream.num_parts for stream in streams}
        assert num_parts == ({2} if victim == "gateway" else {1})


async def test_a_killed_gateway_costs_no_stream_a_token(pairs: ProxiedCluster) -> None:
    """Its successor takes the streams up at the same address."""
    async with AsyncClient(pairs.address) as client:
        streams = Streams(client, seed=2, num_streams=16, num_tokens=100)
        await streams.all_run()
        send(pairs, signal.SIGKILL, "gateway")
        assert not await streams.finish()
        await until_quiet(client, 4)


@pytest.mark.parametrize("victim", ["decode-0", pytest.param("prefill-0", marks=pytest.mark.long)])
async def test_a_frozen_worker_is_noticed_and_what_it_says_later_is_not_heard(
    pairs: ProxiedCluster, victim: str
) -> None:
    async with using(pairs) as client:
        streams = Streams(client, seed=3, num_streams=12)
        await streams.streams[0].tokens(1)
        send(pairs, signal.SIGSTOP, victim)
        try:
            assert not await streams.finish()
        finally:
            send(pairs, signal.SIGCONT, victim)
        await until_quiet(client, 4)
        assert not await Streams(client, seed=4).finish()


@pytest.mark.long
async def test_the_decode_worker_that_streams_were_resumed_on_dies_too(
    pairs: ProxiedCluster,
) -> None:
    async with using(pairs) as client:
        streams = Streams(client, seed=5, num_tokens=400)
        await streams.all_run()
        send(pairs, signal.SIGKILL, "decode-0")
        # Sequences of the other worker resume here while it is killed, or wait for the return of
        # either.
        send(pairs, signal.SIGKILL, "decode-1")
        assert not await streams.finish()
        assert streams.num_resumes >= len(streams.streams)


async def test_a_stream_outlives_three_failures_and_ends_cleanly_at_the_fourth(
    singles: ProxiedCluster,
) -> None:
    async with using(singles) as client:
        streams = Streams(client, seed=6, num_streams=1, num_tokens=200)
        (stream,) = streams.streams
        await stream.tokens(5)
        for _ in range(MAX_FAILURES):
            await cut_off(singles, client)
            await singles.links["decode-0"].accept()
            await stream.tokens(stream.num_tokens + 5)
            assert not stream.task.done()
        singles.links["decode-0"].cut()
        (error,) = await streams.finish()
        assert error.reason == "WORKER_LOST"
        assert error.retry_after_s


async def test_without_a_prefill_tier_decode_workers_compute_prompts(
    singles: ProxiedCluster,
) -> None:
    async with using(singles) as client:
        streams = Streams(client, seed=7)
        await streams.all_run()
        send(singles, signal.SIGKILL, "prefill-0")
        later = Streams(client, seed=8)
        assert not await streams.finish()
        assert not await later.finish()


async def test_without_a_decode_tier_new_requests_wait_as_old_ones_do(
    singles: ProxiedCluster,
) -> None:
    async with using(singles) as client:
        streams = Streams(client, seed=9)
        await streams.all_run()
        await cut_off(singles, client)
        later = Streams(client, seed=10, num_streams=2)
        assert await client.model(), "asked after them, by the same connection"
        await singles.links["decode-0"].accept()
        assert not await streams.finish()
        assert not await later.finish()


@pytest.mark.long
async def test_a_rolling_restart_of_every_worker(pairs: ProxiedCluster) -> None:
    async with using(pairs) as client:
        for name in ("prefill-0", "decode-0", "prefill-1", "decode-1"):
            streams = Streams(client, seed=11)
            await streams.all_run()
            send(pairs, signal.SIGTERM, name)
            assert not await streams.finish()
            await until_quiet(client, 4)


async def test_a_gateway_that_is_told_to_go_lets_its_streams_end(singles: ProxiedCluster) -> None:
    async with using(singles) as client:
        streams = Streams(client, seed=12)
        await streams.all_run()
        send(singles, signal.SIGTERM, "gateway")
        assert not await streams.finish()


async def test_streams_that_their_clients_give_up_at_any_token_leave_nothing(
    pairs: ProxiedCluster,
) -> None:
    async with using(pairs) as client:
        streams = Streams(client, seed=13, num_streams=20)

        async def give_up(number: int) -> None:
            stream = streams.streams[number]
            await stream.tokens(3 * number)
            await stream.cancel()

        await asyncio.gather(*(give_up(number) for number in range(20)))
