"""Choices, the best of them, searches and scored prompts at once, while decode workers drain, die
and run out of memory."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from baton.errors import InvalidRequest
from baton.types import BeamParams, Sampling, SequenceSpec, Tier
from engine.oracle import oracle_tokens
from tests.support.oracle_reference import oracle_beams, oracle_prompt_logprobs
from tests.support.sim_system import DecodeNode, History, System
from tests.support.sim_tiers import SimShape
from tests.support.virtual_loop import run_virtual

VOCAB = 1000


@dataclass(frozen=True)
class Wish:
    """A request, and the number of choices it returns."""

    spec: SequenceSpec
    num_returned: int


def draw_wish(rng: random.Random, index: int) -> Wish:
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(2, 30)))
    kind = rng.choice(["plain", "choices", "best", "search", "scored"])
    num_choices = rng.randint(2, 4) if kind in ("choices", "best", "search") else 1
    is_search = kind == "search"
    sampling = Sampling(
        temperature=0.0 if is_search else rng.choice([0.0, 0.8]),
        seed=rng.getrandbits(64),
        max_tokens=rng.randint(1, 12) if is_search else rng.randint(1, 40),
        stop_token_ids=frozenset(rng.sample(range(VOCAB), 15)),
        beam=BeamParams(4, num_returned=num_choices) if is_search else None,
        prompt_logprobs=2 if kind == "scored" else -1,
    )
    spec = SequenceSpec(f"r{index}", prompt, sampling, arrival_ns=index, num_choices=num_choices)
    return Wish(spec, 1 if kind == "best" else num_choices)


def all_outputs(spec: SequenceSpec) -> list[list[int]]:
    if spec.sampling.beam:
        found = oracle_beams(spec.prompt_token_ids, spec.sampling, VOCAB)
        return [list(hypothesis.token_ids) for hypothesis in found]
    return [
        oracle_tokens(spec.prompt_token_ids, spec.sampling, VOCAB, choice)
        for choice in range(spec.num_choices)
    ]


def check(wish: Wish, history: History) -> None:
    outputs = all_outputs(wish.spec)
    if wish.num_returned < wish.spec.num_choices:
        if not history.is_cancelled:
            (chunk,) = history.chunks
            assert list(chunk.token_ids) in outputs
            assert chunk.usage.completion_tokens == sum(map(len, outputs))
            assert not chunk.logprobs
        return
    history.check(outputs)
    scored = [position for chunk in history.chunks for position in chunk.prompt_logprobs]
    if wish.spec.sampling.prompt_logprobs >= 0 and history.chunks:
        expected = oracle_prompt_logprobs(wish.spec.prompt_token_ids, wish.spec.sampling, VOCAB)
        assert [p.chosen.token_id for p in scored] == [e.token_id for e in expected]
        assert [p.chosen.logprob for p in scored] == pytest.approx([e.logprob for e in expected])
    else:
        assert not scored


async def serve(system: System, wishes: list[Wish], num_cancels: int) -> list[History]:
    rng = system.rng
    histories = [History() for _ in wishes]

    async def client(wish: Wish, history: History) -> None:
        try:
            await asyncio.sleep(rng.uniform(0, 1.0))
        except asyncio.CancelledError:
            history.is_cancelled = True
            raise
        await system.request(wish.spec, history, num_returned=wish.num_returned)

    async def cancel(task: asyncio.Task[None]) -> None:
        await asyncio.sleep(rng.uniform(0, 2.0))
        task.cancel()

    clients = [
        asyncio.create_task(client(wish, history))
        for wish, history in zip(wishes, histories, strict=True)
    ]
    others = [asyncio.create_task(cancel(task)) for task in rng.sample(clients, num_cancels)]
    await asyncio.gather(*clients, return_exceptions=True)
    await asyncio.gather(*others)
    return histories


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [40, 200])
@pytest.mark.parametrize("fault", ["none", "drain", "kill", "drain then kill"])
@pytest.mark.parametrize("seed", range(2))
def test_every_stream_is_that_of_an_undisturbed_request(
    seed: int, fault: str, num_blocks: int
) -> None:
    async def disturb(node: DecodeNode, rng: random.Random) -> None:
        await asyncio.sleep(rng.uniform(0.2, 1.2))
        if "drain" in fault:
            node.drain()
            await asyncio.sleep(rng.uniform(0.0, 0.5))
        if "kill" in fault:
            await node.kill()

    async def main() -> None:
        shape = SimShape(num_blocks=num_blocks, max_local_prefill_tokens=4)
        system = System(seed, num_prefill=2, num_decode=3, decode_shape=shape)
        wishes = [draw_wish(system.rng, index) for index in range(14)]
        disturbing = asyncio.create_task(disturb(system.decodes[0], system.rng))
        histories = await serve(system, wishes, num_cancels=4)
        await disturbing
        for wish, history in zip(wishes, histories, strict=True):
            assert history.error is None
            check(wish, history)
        await system.close()

    run_virtual(main())


def test_what_no_decode_worker_runs_at_once_is_refused_and_all_else_served() -> None:
    async def main() -> None:
        shape = SimShape(num_blocks=40, max_num_seqs=3)
        system = System(2, num_prefill=1, num_decode=2, decode_shape=shape)
        wishes = [draw_wish(system.rng, index) for index in range(24)]
        histories = [History() for _ in wishes]
        await asyncio.gather(
            *(
                system.request(wish.spec, history, num_returned=wish.num_returned)
                for wish, history in zip(wishes, histories, strict=True)
            )
        )
        assert {wish.spec.width > 3 for wish in wishes} == {False, True}
        for wish, history in zip(wishes, histories, strict=True):
            if wish.spec.width <= 3:
                assert history.error is None
                check(wish, history)
                continue
            assert not history.chunks
            assert isinstance(history.error, InvalidRequest)
            assert "4 choices or beams" in str(history.error)
            assert "ask for at most 3" in str(history.error)
        await system.close()

    run_virtual(main())


@pytest.mark.slow
def test_a_worker_with_many_live_streams_is_drained_and_nothing_is_computed_again() -> None:
    async def main() -> None:
        shape = SimShape(num_blocks=600, max_num_seqs=64, max_num_batched_tokens=256)
        system = System(1, num_prefill=1, num_decode=2, decode_shape=shape)
        first, second = system.decodes
        second.drain()
        sampling = Sampling(temperature=1.0, seed=5, max_tokens=40)
        specs = [
            SequenceSpec(f"r{i}", (i, 2, 3), sampling, arrival_ns=i, num_choices=1 + i % 2)
            for i in range(12)
        ]
        histories = [History() for _ in specs]
        await asyncio.sleep(0.1)
        clients = [
            asyncio.create_task(system.request(spec, history))
            for spec, history in zip(specs, histories, strict=True)
        ]
        while not all(history.chunks for history in histories):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert second.worker.pool.counts().leased == 0
        num_prompts = system.prefills[0].num_opened
        system.fleet.add("d2", Tier.DECODE)
        third = DecodeNode(system, "d2")
        system.decodes.append(third)
        first.drain()
        await asyncio.gather(*clients)
        for spec, history in zip(specs, histories, strict=True):
            assert history.error is None
            history.check(all_outputs(spec))
        assert "HandedOff" in system.seen
        assert system.prefills[0].num_opened == num_prompts == len(specs)
        resumes = sum(history.chunks[-1].timing.num_resumes for history in histories)
        assert resumes == 0
        await system.close()

    run_virtual(main())
