"""An account that comes and goes does not wait for a whole answer of one that takes all it gets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from baton.types import Tier
from gateway.routing import spare_place
from gateway.routing.spare_place import EXPECTED_S, MIN_PLACES, SparePlace
from tests.support.gateway_world import Client, World, gateway_world, make_spec
from tests.support.virtual_loop import run_virtual

#: Tokens of an answer of the account that floods, a hundredth of a second each.
LONG = 100


def test_a_place_is_kept_while_an_account_is_expected() -> None:
    spare = SparePlace()
    spare.on_request(b"flood", 0.0)
    spare.on_placed(b"flood")
    assert not spare.is_kept_from(b"flood", 0.0)
    spare.on_request(b"polite", 1.0)
    spare.on_placed(b"polite")
    assert not spare.is_kept_from(b"flood", 2.0)
    spare.on_released(b"polite")
    assert spare.is_kept_from(b"flood", 2.0)
    assert not spare.is_kept_from(b"polite", 2.0)
    assert not spare.is_kept_from(b"third", 2.0)
    assert not spare.is_kept_from(b"flood", 1.0 + EXPECTED_S)


async def _flood(world: World, num_requests: int = 150) -> None:
    async with asyncio.TaskGroup() as group:
        for index in range(num_requests):
            spec = make_spec(f"f{index}", arrival_ns=index, max_tokens=LONG)
            group.create_task(world.generate(spec, account=b"flood"))


async def _polite_waits_s(
    world: World, num_requests: int = 8, pause_s: float = 0.37
) -> list[float]:
    """Of each request: the time to its first token."""
    loop, waits_s = asyncio.get_running_loop(), []
    for index in range(num_requests):
        begin_s, client = loop.time(), Client()
        await world.generate(
            make_spec(f"p{index}", arrival_ns=10**9 + index), client, account=b"polite"
        )
        waits_s.append(client.times_s[0] - begin_s)
        await asyncio.sleep(pause_s)
    return waits_s


def _measured(
    beside: Callable[[World], object], *, num_prefills: int = 0, num_places: int = MIN_PLACES
) -> list[float]:
    found: list[float] = []

    async def main() -> None:
        async with gateway_world(
            num_prefills=num_prefills, num_blocks=2000, max_num_seqs=num_places
        ) as world:
            flood = asyncio.ensure_future(beside(world))  # type: ignore[call-overload]
            await asyncio.sleep(2.5)
            found.extend(await _polite_waits_s(world))
            assert not flood.done()
            flood.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await flood
            await world.settle()
            world.check_empty()

    run_virtual(main(), max_time_s=3600)
    return found


@pytest.mark.parametrize("num_prefills", [0, 1])
def test_only_the_first_request_waits_for_a_place(num_prefills: int) -> None:
    first_s, *others_s = _measured(_flood, num_prefills=num_prefills)
    assert 0.1 < first_s <= LONG / 100
    assert max(others_s) < 0.1, others_s


def test_a_few_places_are_all_given_away() -> None:
    waits_s = _measured(_flood, num_places=2)
    assert max(waits_s[1:]) > 0.1


def test_a_place_that_nobody_comes_for_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_place, "EXPECTED_S", 3.0)

    async def main() -> None:
        async with gateway_world(num_prefills=0, num_blocks=2000, max_num_seqs=MIN_PLACES) as world:
            flood = asyncio.ensure_future(_flood(world))
            await asyncio.sleep(2.5)
            (worker,) = world.fleet.tier(Tier.DECODE)
            assert worker.num_in_flight == MIN_PLACES
            await _polite_waits_s(world, 2)
            assert worker.num_in_flight == MIN_PLACES - 1
            await asyncio.sleep(3.0 + LONG / 100)
            assert worker.num_in_flight == MIN_PLACES
            flood.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await flood

    run_virtual(main(), max_time_s=3600)


def test_a_wide_request_is_not_put_off_for_ever() -> None:
    """It asks for all places but one, beside a polite account that comes again and again."""

    async def main() -> None:
        async with gateway_world(
            num_prefills=0, num_blocks=2000, max_num_seqs=MIN_PLACES, max_queue_size=2000
        ) as world:
            flood = asyncio.ensure_future(_flood(world))
            polite = asyncio.ensure_future(_polite_waits_s(world, 10_000, 0.0))
            await asyncio.sleep(1.0)
            wide = make_spec("wide", arrival_ns=7, num_choices=MIN_PLACES - 1)
            await world.generate(wide, account=b"flood", timeout_s=60.0)
            for task in (flood, polite):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    run_virtual(main(), max_time_s=3600)
