"""The asynchronous client against a live server, and that it offers just what the synchronous one
does."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import subprocess
import sys
from typing import Any

import pytest

from baton.client import (
    AsyncClient,
    AsyncCompletionStream,
    BatonError,
    BeamSearch,
    Cancelled,
    Client,
    CompletionStream,
    DeadlineExceeded,
    FinishReason,
    InvalidRequest,
    NoWorkers,
    Overloaded,
    SamplingParams,
    WorkerLost,
)
from baton.client.calls import MAX_AT_ONCE, MIN_RESUMPTIONS
from baton.errors import BY_REASON
from tests.support.fake_inference import SERVICE, FakeInference, echo, whole_choices

_TWINS = {"enter", "exit", "iter", "next"}


def public(cls: type[Any]) -> dict[str, list[tuple[str, object]]]:
    """Names and parameters of what a class offers; __aenter__ and its like under the names of their
    twins."""
    found = {}
    for name, member in vars(cls).items():
        bare = name.strip("_").removeprefix("a")
        if name.startswith("_") and name != "__init__" and bare not in _TWINS:
            continue
        parameters = (
            [
                (p.name, p.kind, p.default, p.annotation)
                for p in inspect.signature(member).parameters.values()
            ]
            if inspect.isfunction(member)
            else []
        )
        found[bare if name.startswith("__a") else name.strip("_")] = parameters
    return found


def test_both_clients_offer_the_same() -> None:
    assert public(Client) == public(AsyncClient)
    assert len(public(Client)) >= 10
    for twin in (CompletionStream, AsyncCompletionStream):
        assert public(twin).keys() == {
            "init", "request_id", "collect", "close", "iter", "next", "enter", "exit",
        }  # fmt: skip


async def test_a_whole_answer(async_client: AsyncClient, fake: FakeInference) -> None:
    answer = await async_client.generate("héy", SamplingParams(seed=3, n=1), n=2, stop="END")
    assert [choice.text for choice in answer.choices] == ["héy", "héy"]
    assert (answer.token_ids, answer.finish_reason) == (
        tuple(map(ord, "héy")),
        FinishReason.STOP,
    )
    assert (answer.usage.completion_tokens, answer.request_id) == (6, "server-1")
    assert (fake.requests[0].sampling.n, fake.requests[0].sampling.seed) == (2, 3)


async def test_a_class_reaches_the_server(async_client: AsyncClient, fake: FakeInference) -> None:
    await async_client.generate("x", slo_class="batch")
    assert [request.slo_class for request in fake.requests] == ["batch"]


async def test_a_stream_gives_the_pieces_in_order(async_client: AsyncClient) -> None:
    async with async_client.stream([7, 8, 9]) as stream:
        chunks = [chunk async for chunk in stream]
    assert [(c.token_index, c.token_ids) for c in chunks[:-1]] == [(0, (7,)), (1, (8,)), (2, (9,))]
    assert [c.usage is not None for c in chunks] == [False, False, False, True]
    assert [chunk async for chunk in stream] == []


async def test_many_at_once(async_client: AsyncClient) -> None:
    prompts = [f"prompt {i}" for i in range(30)]
    answers = await asyncio.gather(*map(async_client.generate, prompts))
    assert [answer.text for answer in answers] == prompts


async def test_the_other_calls(async_client: AsyncClient) -> None:
    assert (await async_client.tokenize("ab")).token_ids == (97, 98)
    assert await async_client.detokenize([104, 105]) == "hi"
    assert await async_client.models() == (await async_client.model(),)
    assert await async_client.health()
    assert await async_client.health(SERVICE)


@pytest.mark.parametrize("reason", sorted(BY_REASON))
@pytest.mark.parametrize("call", [AsyncClient.generate, AsyncClient.tokenize])
async def test_every_error_is_raised_as_its_type(
    async_client: AsyncClient, fake: FakeInference, reason: str, call: Any
) -> None:
    fake.failures.append(BY_REASON[reason]("what happened", request_id="r-1"))
    with pytest.raises(BY_REASON[reason]) as caught:
        await call(async_client, "prompt")
    assert (caught.value.message, caught.value.request_id) == ("what happened", "r-1")


async def test_an_error_in_mid_stream_comes_after_the_pieces(
    async_client: AsyncClient, fake: FakeInference
) -> None:
    fake.failures_after_first.append(WorkerLost("gone"))
    stream = async_client.stream("", model="hang")
    assert (await anext(stream)).text == "a"
    with pytest.raises(WorkerLost):
        await anext(stream)
    assert [chunk async for chunk in stream] == []


@pytest.mark.parametrize(
    "how",
    [
        "close",
        "leave",
        "raise",
        # It collects all garbage of a large process.
        pytest.param("forget", marks=pytest.mark.slow),
        "close the client",
    ],
)
async def test_a_stream_that_is_left_is_cancelled(
    async_client: AsyncClient, fake: FakeInference, how: str
) -> None:
    stream = async_client.stream("", model="hang")
    await anext(stream)
    match how:
        case "close":
            await stream.close()
            await stream.close()
        case "leave":
            async with stream:
                pass
        case "raise":
            with pytest.raises(ZeroDivisionError):
                async with stream:
                    raise ZeroDivisionError
        case "forget":
            del stream
            gc.collect()
        case "close the client":
            await async_client.close()
    assert await asyncio.to_thread(fake.ended.get) == ("hang", "cancelled")


@pytest.mark.parametrize("model", ["hang", "silent"])
async def test_cancelling_the_reading_task_cancels_the_request(
    async_client: AsyncClient, fake: FakeInference, model: str
) -> None:
    task = asyncio.create_task(async_client.generate("", model=model))
    assert await asyncio.to_thread(fake.started.get) == model
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(fake.ended.get) == (model, "cancelled")


@pytest.mark.parametrize("closes_client", [False, True])
async def test_closing_from_another_task_wakes_the_reader(
    async_client: AsyncClient, fake: FakeInference, closes_client: bool
) -> None:
    stream = async_client.stream("", model="hang")
    await anext(stream)
    reader = asyncio.create_task(anext(stream, None))
    await asyncio.sleep(0)
    await (async_client.close() if closes_client else stream.close())
    with pytest.raises(Cancelled, match=f"the {'client' if closes_client else 'stream'} was"):
        await reader
    with pytest.raises(Cancelled):
        await stream.collect()
    assert await asyncio.to_thread(fake.ended.get) == ("hang", "cancelled")


async def test_closing_the_client_wakes_whoever_waits_for_an_answer(
    async_client: AsyncClient, fake: FakeInference
) -> None:
    waiting = asyncio.create_task(async_client.tokenize("", model="silent"))
    assert await asyncio.to_thread(fake.started.get) == "silent"
    await async_client.close()
    with pytest.raises(Cancelled):
        await waiting


async def test_a_closed_client_says_so(async_client: AsyncClient) -> None:
    await async_client.close()
    with pytest.raises(Cancelled, match="closed"):
        await async_client.generate("a")
    with pytest.raises(Cancelled, match="closed"):
        await async_client.models()


@pytest.mark.parametrize("model", ["hang", "silent"])
async def test_a_call_ends_by_its_deadline(
    async_client: AsyncClient, fake: FakeInference, model: str
) -> None:
    with pytest.raises(DeadlineExceeded, match="timeout_s"):
        await async_client.generate("", model=model, timeout_s=0.2)
    assert await asyncio.to_thread(fake.ended.get) == (model, "cancelled")


@pytest.mark.parametrize("model", ["gap", "double", "cut", "onwards"])
async def test_a_stream_that_breaks_its_rules_is_an_error(
    async_client: AsyncClient, model: str
) -> None:
    with pytest.raises(BatonError, match="the stream"):
        await async_client.generate("", model=model)


async def test_a_gateway_that_is_not_there() -> None:
    async with AsyncClient("127.0.0.1:1", max_retries=0) as client:
        with pytest.raises(NoWorkers, match=r"gateway not reachable at 127\.0\.0\.1:1"):
            await client.models()


async def test_retries_until_it_succeeds(async_client: AsyncClient, fake: FakeInference) -> None:
    async with AsyncClient(async_client.address, max_retries=2) as client:
        fake.failures.extend([Overloaded("full", retry_after_s=0.01)] * 2)
        assert (await client.generate("ab")).text == "ab"
        fake.failures.extend([Overloaded("full", retry_after_s=0.01)] * 2)
        assert await client.detokenize([65]) == "A"
        fake.failures.extend([Overloaded("full", retry_after_s=0.01)] * 3)
        with pytest.raises(Overloaded):
            await client.generate("ab")
    assert len(fake.requests) == 9


async def test_a_stream_goes_on_behind_what_came(
    async_client: AsyncClient, fake: FakeInference
) -> None:
    fake.failures_after_first.extend([WorkerLost("gone", retry_after_s=0)] * 5)
    async with AsyncClient(async_client.address, max_retries=1) as client:
        done = await client.generate("abc", n=2)
    assert [choice.text for choice in done.choices] == ["abc", "abc"]
    requests = fake.requests
    assert len(requests) == 6
    assert len({request.sampling.seed for request in requests}) == 1
    counts = [[len(entry.token_ids) for entry in request.resume_from] for request in requests]
    assert counts == [[], [1], [1, 1], [2, 1], [2, 2], [3, 2]]
    assert [entry.num_chars for entry in requests[-1].resume_from] == [3, 2]


async def test_best_of_as_many_as_are_returned_goes_on_as_any_other(
    async_client: AsyncClient, fake: FakeInference
) -> None:
    """None of them is held back, so that the gateway sends them as they come."""
    fake.failures_after_first.append(WorkerLost("gone", retry_after_s=0))
    async with AsyncClient(async_client.address, max_retries=1) as client:
        done = await client.generate("abc", n=2, best_of=2)
    assert [choice.text for choice in done.choices] == ["abc", "abc"]
    assert len({request.sampling.seed for request in fake.requests}) == 1
    assert [len(request.resume_from) for request in fake.requests] == [0, 1]


async def test_a_stream_that_gets_nowhere_fails(
    async_client: AsyncClient, fake: FakeInference
) -> None:
    fake.failures_after_first.append(WorkerLost("gone", retry_after_s=0))
    async with AsyncClient(async_client.address, max_retries=2) as client:
        stream = client.stream("ab")
        await anext(stream)
        fake.failures.extend([WorkerLost("gone", retry_after_s=0)] * 9)
        with pytest.raises(WorkerLost):
            await anext(stream)
    assert len(fake.requests) == 1 + MIN_RESUMPTIONS


async def test_a_stream_waits_longer_for_its_gateway_than_a_first_call(
    async_client: AsyncClient, fake: FakeInference
) -> None:
    """To start a gateway again takes longer than the retries of a first call do."""
    fake.failures_after_first.append(WorkerLost("gone", retry_after_s=0))
    async with AsyncClient(async_client.address) as client:
        stream = client.stream("ab")
        await anext(stream)
        fake.failures.extend([WorkerLost("gone", retry_after_s=0)] * 4)
        assert "".join([chunk.text async for chunk in stream]) == "b"


@pytest.mark.parametrize("params", [{"best_of": 4}, {"beam_search": BeamSearch(width=4)}])
async def test_what_comes_at_its_end_is_computed_again_and_comes_once(
    async_client: AsyncClient, fake: FakeInference, params: dict[str, Any]
) -> None:
    """It broke off twice behind the first of three choices."""
    fake.failures_after_first.extend([WorkerLost("gone", retry_after_s=0)] * 2)
    async with AsyncClient(async_client.address, max_retries=2) as client:
        chunks = [chunk async for chunk in client.stream("ab", n=3, **params)]
    assert [(chunk.choice, chunk.text) for chunk in chunks] == [(0, "ab0"), (1, "ab1"), (2, "ab2")]
    assert len(fake.requests) == 3
    assert not any(request.resume_from for request in fake.requests)
    assert len({request.sampling.seed for request in fake.requests}) == 1


async def test_what_comes_again_is_no_progress(
    async_client: AsyncClient, fake: FakeInference
) -> None:
    fake.failures_after_first.extend([WorkerLost("gone", retry_after_s=0)] * 9)
    async with AsyncClient(async_client.address, max_retries=2) as client:
        with pytest.raises(WorkerLost):
            await client.generate("ab", n=2, best_of=3)
    assert len(fake.requests) == 1 + MIN_RESUMPTIONS


async def test_a_choice_that_is_another_one_when_it_comes_again_is_an_error(
    async_client: AsyncClient, fake: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a gateway refuses that has only workers of another numerics class."""
    fake.failures_after_first.append(WorkerLost("gone", retry_after_s=0))
    async with AsyncClient(async_client.address, max_retries=2) as client:
        stream = client.stream("ab", n=2, best_of=3)
        assert (await anext(stream)).text == "ab0"
        others = whole_choices(fake.requests[0])
        others[0].token_ids[0] += 1
        monkeypatch.setattr("tests.support.fake_inference.whole_choices", lambda _: others)
        with pytest.raises(BatonError, match="choice 0 is another one now"):
            await anext(stream)


async def test_of_a_choice_that_came_in_part_nothing_is_computed_again(
    async_client: AsyncClient, fake: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gateway sends so what comes at its end."""
    fake.failures_after_first.append(WorkerLost("gone", retry_after_s=0))
    monkeypatch.setattr("tests.support.fake_inference.whole_choices", echo)
    async with AsyncClient(async_client.address, max_retries=5) as client:
        with pytest.raises(WorkerLost):
            await client.generate("ab", n=1, best_of=2)
    assert len(fake.requests) == 1


@pytest.mark.slow
async def test_the_next_gateway_is_used_where_one_fails(async_client: AsyncClient) -> None:
    addresses = f"127.0.0.1:1, {async_client.address}"
    async with AsyncClient(addresses, max_retries=1) as client:
        assert (await client.generate("ab")).text == "ab"


async def test_what_cannot_be_sent_is_not_sent(
    async_client: AsyncClient, fake: FakeInference
) -> None:
    with pytest.raises(InvalidRequest, match="position 1"):
        await async_client.generate("a\ud800")
    with pytest.raises(InvalidRequest, match="position 1"):
        async_client.stream("a\ud800")
    assert fake.requests == []


async def test_no_call_is_left_running(async_client: AsyncClient, fake: FakeInference) -> None:
    streams = [async_client.stream("", model="hang") for _ in range(20)]
    for stream in streams:
        await anext(stream)
    for stream in streams:
        await stream.close()
    for _ in streams:
        assert await asyncio.to_thread(fake.ended.get) == ("hang", "cancelled")
    assert (await async_client.generate("ab")).text == "ab"


@pytest.mark.slow
async def test_closed_clients_leave_no_connections(async_client: AsyncClient) -> None:
    """Half-read streams are no cycle: their connections do not wait for the garbage collector."""
    num_clients = 12

    def num_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    gc.disable()
    try:
        before = num_files()
        for _ in range(num_clients):
            async with AsyncClient(async_client.address, max_retries=0) as client:
                stream = client.stream("", model="flood")
                await anext(stream)
                del stream
        # gRPC closes in the background: some of the last ones may still be open, each with two ends
        # here.
        assert num_files() - before < num_clients
    finally:
        gc.enable()


@pytest.mark.slow
def test_the_sdk_needs_no_torch() -> None:
    code = (
        "import sys, baton.client; "
        "print(sorted({'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


async def test_a_beam_search_has_no_seed(async_client: AsyncClient, fake: FakeInference) -> None:
    """A gateway refuses one that has."""
    await async_client.generate("ab", beam_search=BeamSearch(width=2))
    assert not fake.requests[0].sampling.HasField("seed")


async def test_several_prompts_are_answered_in_their_order(
    async_client: AsyncClient, fake: FakeInference
) -> None:
    texts = [f"no. {i}" for i in range(MAX_AT_ONCE + 5)]
    answers = await async_client.generate_all(texts, seed=3, request_id="all")
    assert [answer.text for answer in answers] == texts
    assert {request.sampling.seed for request in fake.requests} == {3}
    with pytest.raises(InvalidRequest, match="priority"):
        await async_client.generate_all(["a", "b"], priority=2**40)
    assert await async_client.generate_all([]) == []
