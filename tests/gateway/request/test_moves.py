"""Running sequences that change decode workers: clients see an unbroken stream, and nothing is
computed again."""

from __future__ import annotations

import asyncio

import pytest

from baton.types import BeamParams, Tier, WorkerLoad
from gateway.intake.request import TextOptions
from gateway.request import state
from gateway.routing import migrator
from gateway.routing.migrator import MAX_MIGRATIONS
from tests.support.fake_workers import expected_outputs, text_of
from tests.support.gateway_world import Client, World, in_world, make_spec


def busy_and_idle(world: World) -> tuple[int, int]:
    """Which of two decode workers has the sequences, and which has none."""
    busy = max(range(2), key=lambda i: world.decodes[i].num_sequences)
    assert world.decodes[1 - busy].num_sequences == 0
    return busy, 1 - busy


async def all_on_one(world: World, num_choices: int = 1, **options: object) -> asyncio.Task[Client]:
    """A request with all choices on one worker."""
    spec = make_spec("a", num_choices=num_choices, max_tokens=60, **options)  # type: ignore[arg-type]
    request = asyncio.create_task(world.generate(spec, Client()))
    await asyncio.sleep(0.1)
    return request


@pytest.mark.parametrize("num_choices", [1, 4])
def test_a_worker_that_drains_is_emptied_and_nothing_is_computed_again(num_choices: int) -> None:
    async def test(world: World) -> None:
        request = await all_on_one(world, num_choices)
        busy, idle = busy_and_idle(world)
        world.decodes[busy].drain()
        await asyncio.sleep(0.3)
        assert world.decodes[busy].num_sequences == 0
        assert world.decodes[busy].num_handed_off == num_choices
        assert world.decodes[idle].num_sequences == num_choices
        in_flight = [worker.num_in_flight for worker in world.fleet.tier(Tier.DECODE)]
        assert sorted(in_flight) == [0, num_choices]
        client = await request
        spec = make_spec("a", num_choices=num_choices, max_tokens=60)
        assert client.outputs() == expected_outputs(spec)
        assert world.prefills[0].num_prefills == 1
        timing = client.chunks[-1].timing
        assert timing.num_resumes == 0
        assert timing.decode_worker == world.decodes[idle].info.identity.worker_id
        assert timing.transfer_bytes == 100 * (1 + num_choices)

    in_world(test, num_decodes=2, num_blocks=128)


def test_few_move_at_once_and_all_get_there() -> None:
    async def test(world: World) -> None:
        specs = [make_spec(f"r{i}", arrival_ns=i, max_tokens=80) for i in range(3 * MAX_MIGRATIONS)]
        world.decodes[1].is_mute = True  # for a while, so that all are on the first
        world.fleet.report("d1:1", WorkerLoad(is_draining=True))
        requests = [asyncio.create_task(world.generate(spec)) for spec in specs]
        await asyncio.sleep(0.2)
        assert world.decodes[0].num_sequences == len(specs)
        world.decodes[1].is_mute = False
        world.decodes[1]._report()
        world.decodes[0].drain()
        most = 0
        while world.decodes[0].num_sequences:
            moving = sum(s.is_moving for s in world.decodes[0]._sequences.values())
            most = max(most, moving)
            await asyncio.sleep(0.001)
        assert 1 < most <= MAX_MIGRATIONS
        for spec, request in zip(specs, requests, strict=True):
            assert (await request).outputs() == expected_outputs(spec)

    in_world(test, num_decodes=2, num_blocks=1000, max_num_seqs=40)


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.004, 0.01, 0.02, 0.024, 0.03, 0.04, 0.06])
@pytest.mark.parametrize("victim", ["here", "there", "both"])
@pytest.mark.parametrize("loses_transfers", [False, True])
def test_a_move_outlives_the_workers(after_s: float, victim: str, loses_transfers: bool) -> None:
    async def test(world: World) -> None:
        request = await all_on_one(world, 2)
        busy, idle = busy_and_idle(world)
        world.decodes[busy].loses_transfers = loses_transfers
        world.decodes[busy].drain()
        while not any(s.is_paused for s in world.decodes[busy]._sequences.values()):
            await asyncio.sleep(0.001)
        await asyncio.sleep(after_s)
        if victim in ("here", "both"):
            world.decodes[busy].go_down()
        if victim in ("there", "both"):
            world.decodes[idle].go_down()
        client = await request
        spec = make_spec("a", num_choices=2, max_tokens=60)
        assert client.outputs() == expected_outputs(spec)

    in_world(test, num_decodes=3)


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.01, 0.02, 0.024, 0.03])
def test_a_request_that_is_given_up_in_mid_move_leaves_nothing(after_s: float) -> None:
    async def test(world: World) -> None:
        request = await all_on_one(world, 2)
        busy, _ = busy_and_idle(world)
        world.decodes[busy].drain()
        while not any(s.is_paused for s in world.decodes[busy]._sequences.values()):
            await asyncio.sleep(0.001)
        await asyncio.sleep(after_s)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await asyncio.sleep(1e-6)
        assert not any(decode.num_sequences for decode in world.decodes)

    in_world(test, num_decodes=2)


def test_clients_that_do_not_read_hold_no_move_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrator, "MAX_MIGRATIONS", 2)

    async def test(world: World) -> None:
        world.fleet.report("d1:1", WorkerLoad(is_draining=True))
        slow, quick = (
            [make_spec(f"{name}{i}", max_tokens=80, arrival_ns=i) for i in range(3)]
            for name in ("slow", "quick")
        )
        requests = [asyncio.create_task(world.generate(s, Client(read_s=8.0))) for s in slow]
        requests += [asyncio.create_task(world.generate(spec)) for spec in quick]
        await asyncio.sleep(0.1)
        world.decodes[1]._report()
        world.decodes[0].drain()
        await asyncio.sleep(0.5)
        moved = {spec.request_id for spec in world.decodes[1].specs}
        assert moved == {spec.request_id for spec in (*slow, *quick)}
        for spec, request in zip((*slow, *quick), requests, strict=True):
            assert (await request).outputs() == expected_outputs(spec)

    in_world(test, num_decodes=2, num_blocks=400, max_num_seqs=32)


def test_a_worker_that_does_not_pause_goes_on_with_its_sequence() -> None:
    async def test(world: World) -> None:
        request = await all_on_one(world)
        busy, idle = busy_and_idle(world)
        world.decodes[busy].ignores_pauses = True
        world.decodes[busy].drain()
        client = await request
        assert client.outputs() == expected_outputs(make_spec("a", max_tokens=60))
        assert world.decodes[idle].num_opens == 0

    in_world(test, num_decodes=2)


def test_a_transfer_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "HANDOFF_TIMEOUT_S", 1.0)

    async def test(world: World) -> None:
        request = await all_on_one(world)
        busy, _ = busy_and_idle(world)
        world.decodes[busy].loses_transfers = True
        world.decodes[busy].drain()
        client = await request
        assert client.outputs() == expected_outputs(make_spec("a", max_tokens=60))
        assert client.last.timing.num_resumes == 1

    in_world(test, num_decodes=2)


def test_a_worker_without_room_refuses_and_the_sequence_goes_on_where_it_is() -> None:
    async def test(world: World) -> None:
        request = await all_on_one(world)
        busy, idle = busy_and_idle(world)
        world.decodes[
            idle
        ]._num_free = 0  # somebody else took it, and the gateway does not know yet
        world.decodes[busy].drain()
        client = await request
        assert client.outputs() == expected_outputs(make_spec("a", max_tokens=60))
        assert world.decodes[idle].num_deferrals == 1, "it is not asked again at once"
        assert client.last.timing.num_resumes == 0
        world.decodes[idle]._num_free = world.decodes[idle].info.num_blocks

    in_world(test, num_decodes=2)


def test_a_transfer_that_fails_is_not_tried_again_at_once() -> None:
    async def test(world: World) -> None:
        request = await all_on_one(world)
        busy, idle = busy_and_idle(world)
        world.decodes[busy].peers = ()
        world.decodes[busy].drain()
        client = await request
        assert client.outputs() == expected_outputs(make_spec("a", max_tokens=60))
        assert world.decodes[idle].num_opens == 1
        assert client.last.timing.num_resumes == 0

    in_world(test, num_decodes=2)


def test_with_nowhere_to_go_sequences_finish_where_they_are() -> None:
    async def test(world: World) -> None:
        request = await all_on_one(world, 3)
        world.decodes[0].drain()
        client = await request
        spec = make_spec("a", num_choices=3, max_tokens=60)
        assert client.outputs() == expected_outputs(spec)
        assert client.chunks[-1].timing.num_resumes == 0

    in_world(test)


def test_searches_are_not_moved() -> None:
    async def test(world: World) -> None:
        beam = BeamParams(4, num_returned=2)
        request = await all_on_one(world, 2, beam=beam)
        busy, idle = busy_and_idle(world)
        world.decodes[busy].drain()
        client = await request
        spec = make_spec("a", num_choices=2, max_tokens=60, beam=beam)
        assert client.outputs() == expected_outputs(spec)
        assert world.decodes[idle].num_opens == 0

    in_world(test, num_decodes=2)


@pytest.mark.parametrize("read_s", [0.0, 0.05])
def test_a_stop_string_in_mid_move_ends_it(read_s: float) -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", max_tokens=60)
        (output,) = expected_outputs(spec)
        for end in range(9, 16):
            stop = text_of(output)[end - 2 : end + 1]
            text = TextOptions(stop=(stop,))
            request = asyncio.create_task(world.generate(spec, Client(read_s=read_s), text=text))
            await asyncio.sleep(0.1)
            busy = max(world.decodes, key=lambda decode: decode.num_sequences)
            busy.drain()
            client = await request
            assert client.token_ids == output[: end + 1]
            busy.is_draining = False
            busy._report()
            await asyncio.sleep(0.1)

    in_world(test, num_decodes=2)


def test_memory_is_evened_out_before_it_runs_out() -> None:
    async def test(world: World) -> None:
        world.fleet.report("d1:1", WorkerLoad(is_draining=True))
        for decode in world.decodes:
            decode.step_s = 0.05
        specs = [make_spec(f"r{i}", arrival_ns=i, max_tokens=50, seed=i) for i in range(6)]
        requests = [asyncio.create_task(world.generate(spec)) for spec in specs]
        await asyncio.sleep(0.1)
        assert world.decodes[0].num_sequences == 6
        world.decodes[1]._report()
        for spec, request in zip(specs, requests, strict=True):
            assert (await request).outputs() == expected_outputs(spec)
        assert world.decodes[0].num_handed_off > 0
        assert world.decodes[1].num_handed_off == 0, "nothing is moved back"
        assert world.decodes[0].num_preemptions == 0

    in_world(test, num_decodes=2, num_blocks=64)


def test_where_kv_did_not_get_through_lately_nobody_moves() -> None:
    async def test(world: World) -> None:
        request = await all_on_one(world, num_choices=4)
        busy = max(range(3), key=lambda i: world.decodes[i].num_sequences)
        cut, other = (i for i in range(3) if i != busy)
        now_s = asyncio.get_running_loop().time()
        world.fleet.broken_pairs.note(f"d{busy}:1", f"d{cut}:1", now_s)
        world.decodes[busy].drain()
        await asyncio.sleep(0.3)
        assert [world.decodes[i].num_sequences for i in (busy, cut, other)] == [0, 0, 4]
        await request

    in_world(test, num_decodes=3, num_blocks=128)
