"""The synchronous client against a live server: answers, typed errors, and streams that end when
they are left."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from baton.client import (
    BatonError,
    Cancelled,
    Chunk,
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
from baton.client.calls import MAX_AT_ONCE
from baton.errors import BY_REASON
from tests.support.fake_inference import SERVICE, FakeInThread


def first_of(stream: CompletionStream) -> Chunk:
    return next(iter(stream))


def test_a_whole_answer(client: Client, service: FakeInThread) -> None:
    answer = client.generate("héy", SamplingParams(seed=3, n=1), n=2, logprobs=0, stop="END")
    assert [choice.text for choice in answer.choices] == ["héy", "héy"]
    assert answer.token_ids == tuple(map(ord, "héy"))
    assert (answer.text, answer.finish_reason) == ("héy", FinishReason.STOP)
    assert [len(choice.logprobs) for choice in answer.choices] == [3, 3]
    assert {choice.stop for choice in answer.choices} == {"END"}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
    assert (answer.timing.decode_worker, answer.request_id) == ("d0", "server-1")
    (request,) = service.fake.requests
    assert (request.sampling.n, request.sampling.seed) == (2, 3)


def test_a_stream_gives_the_pieces_in_order(client: Client) -> None:
    with client.stream([7, 8, 9]) as stream:
        chunks = list(stream)
    assert [(c.token_index, c.token_ids) for c in chunks[:-1]] == [(0, (7,)), (1, (8,)), (2, (9,))]
    assert [c.usage is not None for c in chunks] == [False, False, False, True]
    assert [c.finish_reason for c in chunks] == [None, None, None, FinishReason.STOP]
    assert list(stream) == []


def test_the_other_calls(client: Client) -> None:
    assert client.tokenize([{"role": "u", "content": "v"}]).token_ids == (ord("u"), ord("v"))
    assert client.tokenize("a").max_model_len == 4096
    assert client.detokenize([104, 105]) == "hi"
    assert client.models() == (client.model(),)
    assert client.model("fake").workers[0].num_free_blocks == 7
    assert client.health()
    assert client.health(SERVICE)


def test_metadata_and_the_request_id_are_sent(service: FakeInThread) -> None:
    with Client(service.address, metadata={"team": "blue"}, max_retries=0) as client:
        client.generate("a", request_id="mine-1")
        client.tokenize("a")
    generated, tokenized = service.fake.metadata
    assert (generated["team"], generated["x-request-id"]) == ("blue", "mine-1")
    assert (tokenized["team"], tokenized["x-request-id"] != "") == ("blue", True)


@pytest.mark.parametrize("reason", sorted(BY_REASON))
@pytest.mark.parametrize("call", [Client.generate, Client.tokenize])
def test_every_error_is_raised_as_its_type(
    client: Client, service: FakeInThread, reason: str, call: Any
) -> None:
    service.fake.failures.append(BY_REASON[reason]("what happened", request_id="r-1", key="value"))
    with pytest.raises(BY_REASON[reason]) as caught:
        call(client, "prompt")
    assert (caught.value.message, caught.value.request_id) == ("what happened", "r-1")


def test_an_error_without_request_id_gets_the_one_that_was_sent(
    client: Client, service: FakeInThread
) -> None:
    service.fake.failures.append(InvalidRequest("no"))
    with pytest.raises(InvalidRequest) as caught:
        client.generate("a", request_id="mine-1")
    assert caught.value.request_id == "mine-1"


def test_an_error_in_mid_stream_comes_after_the_pieces(
    client: Client, service: FakeInThread
) -> None:
    service.fake.failures_after_first.append(WorkerLost("gone"))
    stream = client.stream("", model="hang")
    assert first_of(stream).text == "a"
    with pytest.raises(WorkerLost) as caught:
        next(stream)
    assert caught.value.request_id == "server-1"
    assert list(stream) == []


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
def test_a_stream_that_is_left_is_cancelled(
    client: Client, service: FakeInThread, how: str
) -> None:
    stream = client.stream("", model="hang")
    first_of(stream)
    match how:
        case "close":
            stream.close()
            stream.close()
        case "leave":
            with stream:
                pass
        case "raise":
            with pytest.raises(ZeroDivisionError), stream:
                raise ZeroDivisionError
        case "forget":
            del stream
            gc.collect()
        case "close the client":
            client.close()
    assert service.fake.ended.get() == ("hang", "cancelled")


def test_a_stream_that_was_closed_is_over(client: Client) -> None:
    with client.stream("", model="hang") as stream:
        first_of(stream)
    for _ in range(2):
        with pytest.raises(Cancelled, match="the stream was closed"):
            next(stream)
    with pytest.raises(Cancelled):
        stream.collect()


def test_closing_a_stream_whose_pieces_all_came_cancels_nothing(client: Client) -> None:
    stream = client.stream("ab")
    pieces = [next(stream)]
    while pieces[-1].usage is None:
        pieces.append(next(stream))
    stream.close()
    assert list(stream) == []


@pytest.mark.parametrize("closes_client", [False, True])
def test_closing_from_another_thread_wakes_the_reader(
    client: Client, service: FakeInThread, closes_client: bool
) -> None:
    stream = client.stream("", model="hang")
    first_of(stream)
    closer = threading.Thread(target=client.close if closes_client else stream.close)
    closer.start()
    with pytest.raises(Cancelled):
        next(stream)
    closer.join()
    assert service.fake.ended.get() == ("hang", "cancelled")


def test_a_closed_client_says_so(client: Client) -> None:
    client.close()
    with pytest.raises(Cancelled, match="closed"):
        client.generate("a")
    with pytest.raises(Cancelled, match="closed"):
        client.models()


@pytest.mark.parametrize(
    ("model", "request_id", "timeout_s"),
    # The server's name of the request has to come in time, on a busy machine, too.
    [("hang", "server-1", 2.0), ("silent", "mine-1", 0.2)],
)
def test_a_call_ends_by_its_deadline(
    client: Client, service: FakeInThread, model: str, request_id: str, timeout_s: float
) -> None:
    with pytest.raises(DeadlineExceeded, match="timeout_s") as caught:
        client.generate("", model=model, timeout_s=timeout_s, request_id="mine-1")
    assert caught.value.request_id == request_id
    assert service.fake.ended.get() == (model, "cancelled")


def test_the_clients_own_timeout_is_the_default(service: FakeInThread) -> None:
    with (
        Client(service.address, timeout_s=0.2, max_retries=0) as client,
        pytest.raises(DeadlineExceeded),
    ):
        client.tokenize("", model="silent")


@pytest.mark.parametrize("model", ["gap", "double", "cut", "onwards"])
def test_a_stream_that_breaks_its_rules_is_an_error(
    client: Client, service: FakeInThread, model: str
) -> None:
    with pytest.raises(BatonError, match="the stream") as caught:
        client.generate("", model=model)
    assert caught.value.request_id == "server-1"
    assert service.fake.ended.get()[0] == model


def test_an_answer_too_large_to_take_is_told(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="too large"):
        client.generate("", model="big")


def test_a_gateway_that_is_not_there() -> None:
    with (
        Client("127.0.0.1:1", max_retries=0) as client,
        pytest.raises(NoWorkers, match=r"gateway not reachable at 127\.0\.0\.1:1"),
    ):
        client.models()


def test_retries_until_it_succeeds(service: FakeInThread) -> None:
    fake = service.fake
    with Client(service.address, max_retries=2) as client:
        fake.failures.extend([Overloaded("full", retry_after_s=0.01)] * 2)
        assert client.generate("ab").text == "ab"
        fake.failures.extend([Overloaded("full", retry_after_s=0.01)] * 2)
        assert client.detokenize([65]) == "A"
        assert len(fake.requests) == 6
        fake.failures.extend([Overloaded("full", retry_after_s=0.01)] * 3)
        with pytest.raises(Overloaded):
            client.generate("ab")
        assert len(fake.requests) == 9


def test_no_retry_unless_asked_for(client: Client, service: FakeInThread) -> None:
    service.fake.failures.append(Overloaded("full", retry_after_s=0))
    with pytest.raises(Overloaded):
        client.generate("ab")
    assert len(service.fake.requests) == 1


def test_a_stream_goes_on_behind_what_came(service: FakeInThread) -> None:
    service.fake.failures_after_first.extend([WorkerLost("gone", retry_after_s=0)] * 2)
    with Client(service.address, max_retries=1) as client:
        assert client.generate("abc").text == "abc"
    counts = [[len(c.token_ids) for c in r.resume_from] for r in service.fake.requests]
    assert counts == [[], [1], [2]]


def test_what_comes_at_its_end_is_computed_again_and_comes_once(service: FakeInThread) -> None:
    service.fake.failures_after_first.append(WorkerLost("gone", retry_after_s=0))
    with Client(service.address, max_retries=1) as client:
        chunks = list(client.stream("ab", n=2, best_of=3))
    assert [(chunk.choice, chunk.text) for chunk in chunks] == [(0, "ab0"), (1, "ab1")]


async def test_it_may_be_used_where_an_event_loop_runs(client: Client) -> None:
    assert client.generate("ab").text == "ab"


@pytest.mark.slow
def test_the_next_gateway_is_used_where_one_fails(service: FakeInThread) -> None:
    with Client(f"127.0.0.1:1,{service.address}", max_retries=1) as client:
        assert client.generate("ab").text == "ab"
        assert client.detokenize([65]) == "A"


def test_no_retry_beyond_the_deadline(service: FakeInThread) -> None:
    service.fake.failures.append(Overloaded("full", retry_after_s=50))
    with Client(service.address, max_retries=5, timeout_s=20) as client:
        with pytest.raises(Overloaded):
            client.generate("ab")
        assert len(service.fake.requests) == 1


def test_closing_the_client_ends_the_wait_for_a_retry(service: FakeInThread) -> None:
    service.fake.failures.append(Overloaded("full", retry_after_s=500))
    client = Client(service.address, max_retries=5)
    stream = client.stream("ab")
    assert service.fake.ended.get() == ("", "failed")
    closer = threading.Thread(target=client.close)
    closer.start()
    with pytest.raises((Overloaded, Cancelled)):
        next(stream)
    closer.join()


def test_what_cannot_be_sent_is_not_sent(client: Client, service: FakeInThread) -> None:
    for act in (client.generate, client.tokenize):
        with pytest.raises(InvalidRequest, match="position 1"):
            act("a\ud800")
    with pytest.raises(InvalidRequest, match="metadata"):
        client.generate("a", request_id="new\nline")
    assert service.fake.requests == []


@pytest.mark.slow
def test_several_prompts_are_answered_in_their_order(client: Client, service: FakeInThread) -> None:
    texts = [f"no. {i}" for i in range(MAX_AT_ONCE + 5)]
    answers = client.generate_all(texts, seed=3, request_id="all")
    assert [answer.text for answer in answers] == texts
    assert {request.sampling.seed for request in service.fake.requests} == {3}
    with pytest.raises(InvalidRequest, match="priority"):
        client.generate_all(["a", "b"], priority=2**40)
    assert client.generate_all([]) == []
