"""Many requests over few and small workers: all that are admitted end, in order, whatever happens
meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import BatonError, NoWorkers
from baton.types import Slo, Tier
from gateway.routing.dispatcher import NO_WORKER_GRACE_S
from gateway.routing.history import PrefixHasher, prefix_digests
from gateway.routing.placement import Outcome, Placement
from tests.support.fake_workers import expected_output
from tests.support.gateway_world import Client, World, gateway_world, make_spec
from tests.support.virtual_loop import run_virtual


@dataclass(frozen=True)
class Job:
    start_ms: int
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    cancel_after_ms: int | None


JOBS = st.lists(
    st.builds(
        Job,
        start_ms=st.integers(0, 300),
        num_prompt_tokens=st.integers(1, 40),
        max_tokens=st.integers(1, 30),
        priority=st.integers(-1, 1),
        cancel_after_ms=st.none() | st.integers(0, 400),
    ),
    min_size=1,
    max_size=14,
)
FAULTS = st.lists(
    st.tuples(st.integers(0, 500), st.sampled_from(["preempt", "handoff", "decode", "prefill"])),
    max_size=3,
)


@settings(max_examples=40, deadline=None)
@given(
    jobs=JOBS,
    faults=FAULTS,
    num_prefills=st.integers(0, 2),
    num_decodes=st.integers(1, 2),
    num_blocks=st.integers(18, 30),
    max_num_seqs=st.integers(1, 4),
    tokens_per_step=st.integers(1, 4),
)
def test_all_admitted_requests_end_right(
    jobs: list[Job],
    faults: list[tuple[int, str]],
    num_prefills: int,
    num_decodes: int,
    num_blocks: int,
    max_num_seqs: int,
    tokens_per_step: int,
) -> None:
    async def run_job(world: World, number: int, job: Job) -> None:
        await asyncio.sleep(job.start_ms / 1e3)
        spec = make_spec(
            f"r{number}",
            [number + 1] * job.num_prompt_tokens,
            arrival_ns=number,
            max_tokens=job.max_tokens,
        )
        client = Client()
        limit_s = None if job.cancel_after_ms is None else job.cancel_after_ms / 1e3
        try:
            async with asyncio.timeout(limit_s):
                await world.generate(spec, client)
        except TimeoutError:
            assert client.token_ids == expected_output(spec)[: len(client.token_ids)]
        except NoWorkers:
            assert client.chunks == []
        else:
            assert client.token_ids == expected_output(spec)

    async def run_fault(world: World, at_ms: int, kind: str) -> None:
        await asyncio.sleep(at_ms / 1e3)
        if kind == "preempt":
            world.decodes[-1].preempt_all()
        elif kind == "handoff":
            world.decodes[0].fail("HANDOFF_FAILED", is_retriable=True)
        elif kind == "decode":
            world.decodes[0].go_down()
            await asyncio.sleep(0.2)
            world.decodes[0].come_up()
        elif world.prefills:
            world.prefills[0].go_down()
            await asyncio.sleep(0.2)
            world.prefills[0].come_up()

    async def main() -> None:
        async with gateway_world(
            num_prefills=num_prefills,
            num_decodes=num_decodes,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
        ) as world:
            for decode in world.decodes:
                decode.tokens_per_step = tokens_per_step
            distinct = {kind: at_ms for at_ms, kind in faults}  # a worker dies once at a time
            async with asyncio.TaskGroup() as group:
                for number, job in enumerate(jobs):
                    group.create_task(run_job(world, number, job))
                for kind, at_ms in distinct.items():
                    group.create_task(run_fault(world, at_ms, kind))
            await world.settle()
            world.check_empty()

    run_virtual(main(), max_time_s=3600)


def test_waiting_sequences_are_placed_by_priority_then_arrival() -> None:
    async def main() -> None:
        async with gateway_world(num_prefills=0, max_num_seqs=1) as world:
            order: list[str] = []

            async def run(name: str, arrival_ns: int, priority: int) -> None:
                spec = make_spec(name, arrival_ns=arrival_ns)
                spec = type(spec)(
                    **{f: getattr(spec, f) for f in spec.__slots__} | {"priority": priority}
                )
                await world.generate(spec)
                order.append(name)

            first = asyncio.create_task(run("first", 0, 0))
            await asyncio.sleep(0.01)
            rest = [run("late", 3, 0), run("early", 2, 0), run("urgent", 4, -1), run("idle", 1, 1)]
            await asyncio.gather(first, *rest)
            assert order == ["first", "urgent", "early", "late", "idle"]

    run_virtual(main())


@settings(max_examples=20)
@given(
    num_loose=st.integers(10, 40),
    tight_at=st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True),
)
def test_a_tight_class_is_in_time_while_a_loose_one_waits_and_is_in_time_too(
    num_loose: int, tight_at: list[int]
) -> None:
    """One place, and requests that each hold it for the same time; by arrival, a tight one would
    wait for most of the loose ones."""

    async def main() -> None:
        async with gateway_world(num_prefills=0, max_num_seqs=1) as world:
            loop = asyncio.get_running_loop()

            async def first_token_s(name: str, arrival_ns: int, slo: Slo | None) -> float:
                sent_s = loop.time()
                spec = replace(make_spec(name, arrival_ns=arrival_ns), slo=slo)
                client = await world.generate(spec)
                return client.times_s[0] - sent_s

            begun_s = loop.time()
            await first_token_s("alone", 0, None)
            hold_s = loop.time() - begun_s
            tight, loose = Slo(ttft_s=5.0 * hold_s), Slo(ttft_s=100.0 * hold_s)
            running = [
                asyncio.create_task(first_token_s(f"loose {i}", 1 + i, loose))
                for i in range(num_loose)
            ]
            for number in range(10):
                await asyncio.sleep(hold_s)
                if number in tight_at:
                    arrival_ns = round(1e9 * number * hold_s) + 100
                    took_s = first_token_s(f"tight {number}", arrival_ns, tight)
                    running.append(asyncio.create_task(took_s))
            found_s = await asyncio.gather(*running)
            assert max(found_s[:num_loose]) <= (loose.ttft_s or 0.0)
            assert max(found_s[num_loose:]) <= (tight.ttft_s or 0.0)

    run_virtual(main())


def test_a_loose_class_does_not_wait_for_ever_behind_a_tight_one_that_is_too_much() -> None:
    async def main() -> None:
        async with gateway_world(num_prefills=0, max_num_seqs=1) as world:
            loop = asyncio.get_running_loop()
            begun_s = loop.time()
            await world.generate(make_spec("alone"))
            hold_s = loop.time() - begun_s

            def asked(name: str, slo: Slo) -> asyncio.Task[Client]:
                arrival_ns = round(1e9 * loop.time())
                spec = replace(make_spec(name, arrival_ns=arrival_ns), slo=slo)
                return asyncio.create_task(world.generate(spec))

            running = [asked(f"first {i}", Slo(3.0 * hold_s)) for i in range(2)]
            loose = asked("loose", Slo(10.0 * hold_s))
            for number in range(100):
                running.append(asked(f"tight {number}", Slo(3.0 * hold_s)))
                await asyncio.sleep(0.9 * hold_s)
            assert loose.done()
            await asyncio.gather(loose, *running)

    run_virtual(main())


def test_a_prefill_worker_keeps_a_short_queue() -> None:
    async def main() -> None:
        async with gateway_world(num_blocks=10_000, max_num_seqs=1000) as world:
            requests = [
                world.generate(make_spec(f"r{i}", [i + 1] * 40, arrival_ns=i)) for i in range(30)
            ]
            await asyncio.gather(*requests)
            limit = 2 * world.prefills[0].info.max_num_batched_tokens + 40
            assert world.prefills[0].max_pending_tokens <= limit

    run_virtual(main())


def test_memory_is_reserved_only_when_the_prefill_is_about_to_start() -> None:
    """What waits for the prefill tier holds no block of the decode tier."""

    async def main() -> None:
        async with gateway_world(num_blocks=10_000, max_num_seqs=1000) as world:
            requests = [
                asyncio.create_task(world.generate(make_spec(f"r{i}", [i + 1] * 40, arrival_ns=i)))
                for i in range(30)
            ]
            await asyncio.sleep(0.01)
            used = 10_000 - world.decodes[0].num_free_blocks
            assert 0 < used <= 4 * 11, "four prompts at most: the prefill worker's credit"
            await asyncio.gather(*requests)

    run_virtual(main())


def test_tokens_that_were_prepared_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    add = PrefixHasher.add

    def watched(hasher: PrefixHasher, token_ids: Sequence[int]) -> None:
        looked_at.append(len(token_ids))
        add(hasher, token_ids)

    monkeypatch.setattr("gateway.routing.dispatcher.LONG_PIECE", 100)
    monkeypatch.setattr(PrefixHasher, "add", watched)

    async def main() -> None:
        async with gateway_world() as world:
            dispatcher, worker = world.dispatcher, world.fleet.workers["d0:1"]
            short, long = make_spec("s", range(99)), make_spec("l", range(70))
            choices = [long.choice_alone(index, (index,) * 60) for index in range(2)]
            await dispatcher.prepare([short])
            await dispatcher.prepare(choices)
            assert sum(looked_at) == 70 + 2 * 60
            looked_at.clear()
            for choice in choices:
                ended = long.choice_alone(choice.choice, (choice.choice,) * 70)
                dispatcher.record(worker, ended)
                digests = prefix_digests(ended.token_ids, ended.prefix_key, dispatcher._key)
                matched = dispatcher._affinity.matched_tokens(digests)
                assert matched == {worker.address: 128}
            assert [size for size in looked_at if size < 140] == [0, 10] * 2

    run_virtual(main())


def test_a_sequence_is_hashed_once_from_its_place_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[int] = []
    add = PrefixHasher.add

    def watched(hasher: PrefixHasher, token_ids: Sequence[int]) -> None:
        looked_at.append(len(token_ids))
        add(hasher, token_ids)

    monkeypatch.setattr("gateway.routing.dispatcher.STORED_TOKENS", 100)
    monkeypatch.setattr(PrefixHasher, "add", watched)

    async def main() -> None:
        async with gateway_world() as world:
            dispatcher, worker = world.dispatcher, world.fleet.workers["d0:1"]
            spec = make_spec("s", range(150))
            (await world.place(spec)).release()
            moved = dispatcher.place_now(
                replace(spec, output_token_ids=(1,) * 5), world.fleet.ready(Tier.DECODE)
            )
            assert moved is not None
            moved.release()
            ended = replace(spec, output_token_ids=(1,) * 60)
            dispatcher.record(worker, ended)
            assert sum(looked_at) == 150 + 60
            digests = prefix_digests(ended.token_ids, ended.prefix_key, dispatcher._key)
            assert dispatcher._affinity.matched_tokens(digests)[worker.address] == 192
            assert not dispatcher._hashers

    run_virtual(main())


def test_placements_are_counted_until_they_are_released_once() -> None:
    async def main() -> None:
        async with gateway_world() as world:
            placement = await world.place(make_spec("a"))
            prefill, decode = world.fleet.workers["p0:1"], world.fleet.workers["d0:1"]
            assert (prefill.outstanding_tokens, prefill.num_in_flight) == (5, 1)
            assert (sum(decode.unreported_blocks.values()), decode.num_in_flight) == (2, 1)
            for _ in range(2):
                placement.release()
            world.check_empty()

    run_virtual(main())


def test_settled_blocks_are_counted_until_the_next_report() -> None:
    async def main() -> None:
        async with gateway_world() as world:
            decode = world.fleet.workers["d0:1"]
            placement: Placement = await world.place(make_spec("a"))
            world.fleet.report("d0:1", decode.load)
            assert sum(decode.unreported_blocks.values()) == 2, "the worker has not answered yet"
            placement.record(Outcome.RESERVED)
            assert sum(decode.unreported_blocks.values()) == 2
            world.fleet.report("d0:1", decode.load)
            assert not decode.unreported_blocks
            placement.release()

    run_virtual(main())


def test_a_new_request_waits_for_the_only_decode_worker_to_come_back() -> None:
    async def main() -> None:
        async with gateway_world() as world:
            world.decodes[0].go_down()
            request = asyncio.create_task(world.generate(make_spec("a")))
            await asyncio.sleep(NO_WORKER_GRACE_S / 2)
            assert not request.done()
            world.decodes[0].come_up()
            await request

    run_virtual(main())


def test_new_requests_are_refused_at_once_when_no_decode_worker_was_ready_for_long() -> None:
    async def main() -> None:
        async with gateway_world() as world:
            world.decodes[0].go_down()
            await asyncio.sleep(NO_WORKER_GRACE_S)
            now_s = asyncio.get_running_loop().time()
            with pytest.raises(NoWorkers) as caught:
                await world.generate(make_spec("a"))
            assert asyncio.get_running_loop().time() == now_s
            assert caught.value.retry_after_s
            world.decodes[0].come_up()
            await asyncio.sleep(0.1)
            await world.generate(make_spec("b"))

    run_virtual(main())


def test_those_who_wait_share_the_error_when_nobody_comes() -> None:
    async def main() -> None:
        async with gateway_world(num_prefills=0, max_num_seqs=1) as world:
            requests = [
                asyncio.create_task(world.generate(make_spec(f"r{i}", arrival_ns=i)))
                for i in range(4)
            ]
            await asyncio.sleep(0.02)
            world.decodes[0].go_down()
            results = await asyncio.gather(*requests, return_exceptions=True)
            assert all(isinstance(result, BatonError) for result in results)
            assert not world.fleet.ready(Tier.DECODE)
            world.check_empty()

    run_virtual(main())


def test_a_prompt_goes_where_its_beginning_was_seen() -> None:
    async def main() -> None:
        async with gateway_world(num_prefills=3, num_decodes=3, num_blocks=200) as world:
            prompt = list(range(90))
            first = await world.generate(make_spec("r0", prompt))
            for number in range(1, 6):
                await asyncio.sleep(0.1)
                spec = make_spec(f"r{number}", [*prompt, number], arrival_ns=number)
                timing = (await world.generate(spec)).last.timing
                assert timing.prefill_worker == first.last.timing.prefill_worker
                assert timing.decode_worker == first.last.timing.decode_worker

    run_virtual(main())


def test_the_log_has_what_waits_for_a_place() -> None:
    async def main() -> None:
        async with gateway_world(num_prefills=1, num_decodes=1, max_num_seqs=1) as world:
            for number in range(8):
                await world.generate(make_spec(f"r{number}", [1] * 4, max_tokens=2))
            loop, log = asyncio.get_running_loop(), world.dispatcher.log
            before = log.load(loop.time())
            assert before is not None
            assert not before.waiting
            specs = [make_spec(f"long {i}", [1] * (5 + i), max_tokens=50) for i in range(3)]
            tasks = [asyncio.create_task(world.generate(spec)) for spec in specs]
            await asyncio.sleep(0.01)
            load = log.load(loop.time())
            assert load is not None
            waiting = [(demand.num_prompt, round(demand.at_s, 6)) for demand in load.waiting]
            assert waiting == [(6, -0.01), (7, -0.01)]
            await asyncio.gather(*tasks)

    run_virtual(main())
