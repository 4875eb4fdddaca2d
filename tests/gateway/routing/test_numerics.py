"""Workers that round differently: told in a mixed fleet, kept apart in a strict one."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import WorkerLost
from baton.types import NumericsClass, Tier, WorkerLoad
from gateway.routing.fleet import Fleet, WorkerState
from gateway.routing.numerics import NumericsWatch, Rounding
from tests.support.fake_workers import expected_output, make_info
from tests.support.gateway_world import Client, World, in_world, make_spec
from tests.support.stub_link import StubLink
from tests.support.virtual_loop import run_virtual

A = NumericsClass("cpu", "avx512", "bfloat16", "1")
B = replace(A, level="avx2")

ROUNDINGS = st.dictionaries(
    st.sampled_from([f"w{i}:1" for i in range(6)]),
    st.builds(Rounding, st.just("w"), st.sampled_from(Tier), st.sampled_from([A, B])),
)


@given(left=ROUNDINGS, joined=ROUNDINGS)
def test_strangers_are_those_of_other_classes(
    left: dict[str, Rounding], joined: dict[str, Rounding]
) -> None:
    """left: who joined before, and has left or joined anew."""
    strict, mixed = NumericsWatch("strict"), NumericsWatch("mixed")
    for watch in (strict, mixed):
        for address, rounding in left.items():
            watch.put(address, rounding)
        for address, rounding in joined.items():
            watch.put(address, rounding)
        for address in left.keys() - joined.keys():
            watch.drop(address)
    for address, own in joined.items():
        others = {a for a, other in joined.items() if other.numerics != own.numerics}
        assert strict.incompatible_with(address) == others
        assert mixed.incompatible_with(address) == set()
        assert mixed.refusal_of(address) is None
        partners = {r.numerics for r in joined.values() if r.tier is not own.tier}
        is_alone = bool(partners) and own.numerics not in partners
        assert (strict.refusal_of(address) is not None) == is_alone


def test_a_mix_is_logged_once_and_again_with_a_further_class(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = NumericsWatch("mixed")
    with caplog.at_level(logging.WARNING):
        watch.put("p:1", Rounding("p", Tier.PREFILL, A))
        assert not caplog.records
        for _ in range(3):
            watch.put("d:1", Rounding("d", Tier.DECODE, B))
            watch.drop("d:1")
        assert [r.message.count("2 numerics classes") for r in caplog.records] == [1]
        watch.put("d:1", Rounding("d", Tier.DECODE, B))
        watch.put("e:1", Rounding("e", Tier.DECODE, replace(A, dtype="float32")))
    assert len(caplog.records) == 2


def test_a_worker_that_left_keeps_neither_its_class_nor_its_name() -> None:
    async def main() -> None:
        fleet = Fleet([], ["d:1", "e:1", "f:1"])
        fleet.join("d:1", make_info("d", Tier.DECODE, numerics=A), StubLink())
        fleet.join("e:1", make_info("e", Tier.DECODE, numerics=B), StubLink())
        assert fleet.numerics.classes == {A, B}
        fleet.leave("e:1", WorkerState.UNREACHABLE, "lost")
        assert fleet.numerics.classes == {A}
        fleet.join("f:1", make_info("e", Tier.DECODE, numerics=A), StubLink())
        assert fleet.numerics.classes == {A}

    run_virtual(main())


def test_a_worker_without_a_partner_is_refused_until_one_comes() -> None:
    async def main() -> None:
        fleet = Fleet(["p:1", "q:1"], ["d:1", "e:1"], numerics_policy="strict")
        for address, numerics in (("d:1", B), ("e:1", A)):
            fleet.join(address, make_info(address, Tier.DECODE, numerics=numerics), StubLink())
        fleet.join("p:1", make_info("p", Tier.PREFILL, numerics=A), StubLink())

        def report() -> list[WorkerState]:
            for address in ("p:1", "d:1", "e:1"):
                fleet.report(address, WorkerLoad())
            return [fleet.workers[address].state for address in ("p:1", "d:1", "e:1")]

        assert report() == [WorkerState.READY, WorkerState.REFUSED, WorkerState.READY]
        reason = fleet.workers["d:1"].reason
        for part in (
            "d:1",
            "numerics.level",
            "'avx2'",
            "'avx512'",
            "BATON_CPU_LEVEL",
            "--numerics",
        ):
            assert part in reason
        fleet.join("q:1", make_info("q", Tier.PREFILL, numerics=B), StubLink())
        assert report() == [WorkerState.READY] * 3
        assert fleet.workers["d:1"].reason == ""

    run_virtual(main())


def test_a_strict_fleet_pairs_workers_of_one_class_only() -> None:
    async def test(world: World) -> None:
        seen = set()
        for i in range(24):
            placement = await world.place(make_spec(f"r{i}", [i + 1] * 20))
            prefill, decode = placement.prefill, placement.decode
            assert prefill
            assert decode
            seen.add((prefill.address[1:], decode.address[1:]))
            placement.release()
        assert seen == {("0:1", "0:1"), ("1:1", "1:1")}

    in_world(test, **TWO_CLASSES)


def test_a_mixed_fleet_pairs_them_all() -> None:
    async def test(world: World) -> None:
        client = await world.generate(make_spec("r"))
        assert client.token_ids == expected_output(make_spec("r"))
        assert len(world.fleet.numerics.classes) == 2

    in_world(test, num_decodes=1, num_prefills=1, prefill_numerics=[A], decode_numerics=[B])


@pytest.mark.parametrize("policy", ["strict", "mixed"])
def test_what_has_tokens_goes_on_in_its_class_or_not_at_all(policy: str) -> None:
    async def test(world: World) -> None:
        client = Client()
        request = asyncio.create_task(world.generate(make_spec("r", max_tokens=40), client))
        await asyncio.sleep(0.2)
        (at,) = (i for i, decode in enumerate(world.decodes) if decode.num_sequences)
        assert client.token_ids
        world.decodes[at].go_down()
        if policy == "mixed":
            await request
            assert client.token_ids == expected_output(make_spec("r", max_tokens=40))
            return
        with pytest.raises(WorkerLost):
            await request
        assert not world.decodes[1 - at].num_opens

    in_world(test, **(TWO_CLASSES | {"numerics_policy": policy}))


def test_what_has_tokens_finds_another_worker_of_its_class() -> None:
    async def test(world: World) -> None:
        spec = make_spec("r", max_tokens=40)
        client = Client()
        request = asyncio.create_task(world.generate(spec, client))
        await asyncio.sleep(0.2)
        (at,) = (i for i, decode in enumerate(world.decodes) if decode.num_sequences)
        world.decodes[at].go_down()
        await request
        assert client.token_ids == expected_output(spec)
        assert [d.num_opens for i, d in enumerate(world.decodes) if i % 2 != at % 2] == [0, 0]

    in_world(test, **(TWO_CLASSES | {"num_decodes": 4}))


@pytest.mark.parametrize(("policy", "is_moved"), [("strict", False), ("mixed", True)])
def test_nobody_moves_to_another_class_of_a_strict_fleet(policy: str, is_moved: bool) -> None:
    async def test(world: World) -> None:
        spec = make_spec("r", max_tokens=60)
        request = asyncio.create_task(world.generate(spec))
        await asyncio.sleep(0.1)
        (at,) = (i for i, decode in enumerate(world.decodes) if decode.num_sequences)
        world.decodes[at].drain()
        assert (await request).token_ids == expected_output(spec)
        assert world.decodes[at].num_handed_off == is_moved

    in_world(test, **(TWO_CLASSES | {"numerics_policy": policy}))


TWO_CLASSES = {
    "num_prefills": 2,
    "num_decodes": 2,
    "numerics_policy": "strict",
    "prefill_numerics": [A, B],
    "decode_numerics": [A, B],
}
