"""Which sequences change decode workers to even out memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.rebalance import PLENTY, RELIEVED, SHORT, Memory, Sitting, Transfer, rebalance


@st.composite
def memories(draw: st.DrawFn) -> list[Memory]:
    found = []
    for number in range(draw(st.integers(0, 5))):
        num_blocks = draw(st.integers(1, 200))
        available = draw(st.integers(-3, num_blocks))
        block_size = draw(st.sampled_from([4, 16]))
        places = draw(st.integers(-1, 6))
        found.append(Memory(f"d{number}", block_size, num_blocks, available, places))
    return found


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Memory], list[Sitting]]:
    found = draw(memories())
    addresses = [memory.address for memory in found] + ["elsewhere"]
    sittings = [
        Sitting(
            key,
            draw(st.sampled_from(addresses)),
            (draw(st.integers(-1, 1)), key, "r", 0),
            draw(st.integers(1, 300)),
        )
        for key in range(draw(st.integers(0, 12)))
    ]
    return found, sittings


def after(
    found: Sequence[Memory], sittings: Sequence[Sitting], transfers: Sequence[Transfer]
) -> tuple[list[Memory], list[Sitting]]:
    """When the moves are done."""
    by_address = {memory.address: memory for memory in found}
    seated = {sitting.key: sitting for sitting in sittings}
    for transfer in transfers:
        sitting = seated[transfer.key]
        home, target = by_address[sitting.address], by_address[transfer.address]
        by_address[home.address] = replace(
            home,
            num_available_blocks=home.num_available_blocks + sitting.num_blocks_at(home),
            num_places=home.num_places + 1,
        )
        by_address[target.address] = replace(
            target,
            num_available_blocks=target.num_available_blocks - sitting.num_blocks_at(target),
            num_places=target.num_places - 1,
        )
        seated[transfer.key] = replace(sitting, address=target.address)
    return list(by_address.values()), list(seated.values())


@given(fleets(), st.integers(0, 8))
def test_only_short_workers_are_relieved_and_only_by_roomy_ones(
    fleet: tuple[list[Memory], list[Sitting]], max_moves: int
) -> None:
    found, sittings = fleet
    transfers = rebalance(found, sittings, max_moves)
    assert len(transfers) <= max_moves
    assert len({transfer.key for transfer in transfers}) == len(transfers)
    before = {memory.address: memory for memory in found}
    now = {memory.address: memory for memory in after(found, sittings, transfers)[0]}
    for transfer in transfers:
        home, target = before[sittings[transfer.key].address], now[transfer.address]
        assert home.num_available_blocks < SHORT * home.num_blocks
        assert target.num_available_blocks >= PLENTY * target.num_blocks
        assert target.num_places >= 0


@given(fleets())
def test_the_worst_ranked_go_first_and_no_more_than_needed(
    fleet: tuple[list[Memory], list[Sitting]],
) -> None:
    found, sittings = fleet
    transfers = rebalance(found, sittings, 100)
    ranks = [sittings[transfer.key].rank for transfer in transfers]
    assert ranks == sorted(ranks, reverse=True)
    for count in range(len(transfers)):
        home = sittings[transfers[count].key].address
        part = {m.address: m for m in after(found, sittings, transfers[:count])[0]}[home]
        assert part.num_available_blocks < RELIEVED * part.num_blocks


@given(fleets())
def test_nothing_is_moved_back(fleet: tuple[list[Memory], list[Sitting]]) -> None:
    """Again and again, until there is nothing to move: no sequence comes back to where it was."""
    found, sittings = fleet
    homes = {sitting.key: {sitting.address} for sitting in sittings}
    for _ in range(len(sittings) + 1):
        transfers = rebalance(found, sittings, 100)
        for transfer in transfers:
            assert transfer.address not in homes[transfer.key]
            homes[transfer.key].add(transfer.address)
        found, sittings = after(found, sittings, transfers)
    assert rebalance(found, sittings, 100) == []


def test_a_short_worker_is_relieved_of_its_worst() -> None:
    found = [Memory("full", 4, 100, 5, 0), Memory("roomy", 4, 100, 90, 8)]
    sittings = [Sitting(key, "full", (0, key, "r", 0), 39) for key in range(6)]
    assert rebalance(found, sittings, 8) == [Transfer(5, "roomy"), Transfer(4, "roomy")]
    assert rebalance(found, sittings, 1) == [Transfer(5, "roomy")]
