"""Several outputs of one request, and moves between decode workers, over real gRPC and a real KV
channel."""

from __future__ import annotations

import asyncio

import pytest

from baton.client import BeamSearch, SamplingParams
from baton.client.results import Completion, completion_of
from baton.rpc.channel import aio_channel
from baton.types import BeamParams, Sampling
from baton.v1 import worker_pb2, worker_pb2_grpc
from engine.oracle import oracle_tokens
from tests.support.live_tiers import ONLY_DECODES, has_crossed, live_system
from tests.support.oracle_reference import oracle_beams

pytestmark = pytest.mark.slow

PROMPT = list(range(40))
#: KV bytes of a token in an oracle engine.
TOKEN_BYTES = 4 * 2 * 2 * 8


def params(max_tokens: int, **options: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.75, seed=9, max_tokens=max_tokens, ignore_eos=True, **options
    )


def outputs(num_choices: int, max_tokens: int) -> list[tuple[int, ...]]:
    sampling = Sampling(temperature=0.75, seed=9, max_tokens=max_tokens)
    return [tuple(oracle_tokens(PROMPT, sampling, 1000, choice)) for choice in range(num_choices)]


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_each_choice_is_that_of_its_own_request(num_prefill: int) -> None:
    async with live_system(num_prefill, decode_options=ONLY_DECODES) as system:
        done = await system.client.generate(PROMPT, params(20, n=5))
        assert has_crossed(done) == bool(num_prefill)
        assert [choice.token_ids for choice in done.choices] == outputs(5, 20)
        assert done.usage.completion_tokens == 100
        await system.until_quiet()


async def test_more_choices_send_no_more_bytes() -> None:
    options = {"enable_prefix_caching": False}
    async with live_system(worker_options=options, decode_options=ONLY_DECODES) as system:
        alone = await system.client.generate(PROMPT, params(5))
        many = await system.client.generate(PROMPT, params(5, n=8))
        assert many.timing.transfer_bytes == alone.timing.transfer_bytes > 0
        assert many.choices[0].token_ids == alone.token_ids


async def test_the_best_of_several() -> None:
    async with live_system() as system:
        every = await system.client.generate(PROMPT, params(9, n=4, logprobs=0))
        means = [
            sum(position.logprob for position in choice.logprobs) / 9 for choice in every.choices
        ]
        best = await system.client.generate(PROMPT, params(9, n=1, best_of=4))
        (choice,) = best.choices
        assert choice.token_ids == every.choices[means.index(max(means))].token_ids
        assert choice.score == pytest.approx(max(means), abs=1e-5)
        assert not choice.logprobs


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_search_and_a_scored_prompt(num_prefill: int) -> None:
    async with live_system(num_prefill, decode_options=ONLY_DECODES) as system:
        search = SamplingParams(n=2, max_tokens=8, ignore_eos=True, beam_search=BeamSearch(width=4))
        stream = system.client.stream(PROMPT, search)
        chunks = [chunk async for chunk in stream]
        # One piece for each choice: by this the SDK knows those that come again.
        assert sorted(chunk.choice for chunk in chunks) == [0, 1]
        found = completion_of(stream.request_id, chunks)
        assert has_crossed(found) == bool(num_prefill)
        sampling = Sampling(max_tokens=8, beam=BeamParams(4, num_returned=2))
        expected = oracle_beams(PROMPT, sampling, 1000)
        assert [c.token_ids for c in found.choices] == [tuple(e.token_ids) for e in expected]
        assert [c.score for c in found.choices] == pytest.approx([e.score for e in expected])
        scored = SamplingParams(
            temperature=0.0, max_tokens=3, ignore_eos=True, echo=True, prompt_logprobs=1
        )
        done = await system.client.generate(PROMPT, scored)
        assert has_crossed(done) == bool(num_prefill)
        assert done.prompt_token_ids == tuple(PROMPT)
        assert [position.token_id for position in done.prompt_logprobs] == PROMPT[1:]
        await system.until_quiet()


async def test_a_worker_that_drains_hands_its_sequences_over() -> None:
    """No client sees more than a gap, and no prompt is computed again."""
    num_requests, max_tokens = 4, 400
    options = {"oracle_step_ms": 4.0}
    async with live_system(1, 2, worker_options=options, decode_options=ONLY_DECODES) as system:
        requests = [
            asyncio.create_task(system.client.generate(PROMPT, params(max_tokens, n=2)))
            for _ in range(num_requests)
        ]
        async with asyncio.timeout(60):
            while True:
                workers = {w.address: w for w in (await system.client.model()).workers}
                running = [workers[address].num_running for address in system.decodes]
                if sum(running) == 2 * num_requests:
                    break
                await asyncio.sleep(0.01)
        full = system.decodes[running.index(max(running))]
        async with aio_channel(full) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            await stub.Drain(worker_pb2.DrainRequest())
        done: list[Completion] = await asyncio.gather(*requests)
        expected = outputs(2, max_tokens)
        assert all([c.token_ids for c in one.choices] == expected for one in done)
        assert sum(one.timing.num_resumes for one in done) == 0
        # Moved sequences sent more than their prompt, because the prompt was there before.
        assert max(one.timing.transfer_bytes for one in done) > len(PROMPT) * TOKEN_BYTES
        other = next(address for address in system.decodes if address != full)
        ended_at = {one.timing.decode_worker for one in done}
        assert ended_at == {workers[other].worker_id}
        await system.until_quiet()
