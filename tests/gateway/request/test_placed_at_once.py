"""A request that nobody waits before is placed as it comes; its client hears that it was admitted
while workers are at it."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import BatonError, Overloaded
from gateway.intake.request import TextOptions, ValidatedRequest
from gateway.request.driver import RequestDriver, outputs_of
from gateway.routing.placement import Placement
from gateway.routing.router import Need
from tests.support.fake_workers import expected_output
from tests.support.gateway_world import Client, World, gateway_world, in_world, make_spec
from tests.support.virtual_loop import run_virtual


class Notice:
    """What was the case when the client heard that its request was admitted."""

    def __init__(self, world: World, client: Client) -> None:
        self._world = world
        self._client = client
        self.num_opened: list[int] = []
        self.num_waiting: list[int] = []

    async def __call__(self, request_id: str) -> None:
        assert request_id
        assert not self._client.chunks
        self.num_opened.append(sum(len(decode.specs) for decode in self._world.decodes))
        self.num_waiting.append(self._world.dispatcher.num_waiting)


async def run(world: World, request_id: str, notice: Notice, client: Client) -> None:
    now_s = asyncio.get_running_loop().time()
    spec = make_spec(request_id)
    request = ValidatedRequest(spec, TextOptions())
    outputs = outputs_of(request, world.deps.decodings)
    await RequestDriver(world.deps, request, outputs, client.write, now_s + 60.0).run(notice)
    assert client.token_ids == expected_output(spec)


def test_with_room_the_client_hears_of_it_after_its_worker() -> None:
    async def test(world: World) -> None:
        client = Client()
        notice = Notice(world, client)
        await run(world, "a", notice, client)
        assert (notice.num_opened, notice.num_waiting) == ([1], [0])

    in_world(test)


def test_without_room_the_client_hears_of_it_in_the_queue() -> None:
    async def test(world: World) -> None:
        blocker = await world.place(make_spec("first"))
        client = Client()
        notice = Notice(world, client)
        running = asyncio.create_task(run(world, "second", notice, client))
        await asyncio.sleep(1.0)
        assert (notice.num_opened, notice.num_waiting) == ([0], [1])
        blocker.release()
        await running
        assert len(notice.num_opened) == 1

    in_world(test, num_prefills=0, max_num_seqs=1)


def test_the_client_hears_of_it_once_however_often_it_is_placed() -> None:
    async def test(world: World) -> None:
        client = Client()
        notice = Notice(world, client)
        client.on_chunk = lambda _chunk: (
            world.decodes[0].preempt_all() if len(client.chunks) == 2 else None
        )
        await run(world, "a", notice, client)
        assert sum(len(decode.specs) for decode in world.decodes) > 1
        assert len(notice.num_opened) == 1

    in_world(test)


def test_who_waits_for_much_room_is_overtaken_by_who_needs_little_and_keeps_its_turn() -> None:
    async def main() -> None:
        async with gateway_world(num_prefills=0, num_blocks=20) as world:
            blocker = await world.place(make_spec("a", range(40)))
            large = asyncio.create_task(world.place(make_spec("b", range(50))))
            await asyncio.sleep(0.1)
            small = await world.place(make_spec("c", arrival_ns=1))
            equal = asyncio.create_task(world.place(make_spec("d", range(50), arrival_ns=2)))
            await asyncio.sleep(0.1)
            assert not large.done()
            assert not equal.done()
            small.release()
            blocker.release()
            for task in (large, equal):
                (await task).release()
            world.check_empty()

    run_virtual(main())


@pytest.mark.parametrize("num_turns", range(8))
def test_a_place_given_to_one_who_just_left_is_given_back(num_turns: int) -> None:
    async def main() -> None:
        async with gateway_world(num_prefills=0, max_num_seqs=1) as world:
            blocker: Placement = await world.place(make_spec("a"))
            waiting = asyncio.create_task(world.place(make_spec("b", arrival_ns=1)))
            await asyncio.sleep(0.1)
            blocker.release()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            if waiting.done():
                waiting.result().release()
            waiting.cancel()
            await asyncio.wait((waiting,))
            world.check_empty()

    run_virtual(main())


def test_room_that_comes_while_others_are_answered_is_not_overlooked() -> None:
    async def main() -> None:
        async with gateway_world(num_prefills=0, max_num_seqs=1) as world:
            blocker = await world.place(make_spec("a"))
            first = asyncio.create_task(world.place(make_spec("b", range(20))))
            await asyncio.sleep(0.1)
            answers: list[Placement | BatonError] = []

            def on_late(answer: Placement | BatonError) -> None:
                answers.append(answer)
                blocker.release()  # "b" is in no queue at this moment

            late = make_spec("c", arrival_ns=1)
            soon_s = asyncio.get_running_loop().time() + 1.0
            world.dispatcher.place(late, Need.of(late), on_late, deadline_s=soon_s)
            await asyncio.sleep(2.0)
            world.fleet.changed()
            begin_s = asyncio.get_running_loop().time()
            (await first).release()
            # At once, not by a later report of the worker's.
            assert asyncio.get_running_loop().time() - begin_s < 1e-3
            assert [type(answer) for answer in answers] == [Overloaded]

    run_virtual(main())
