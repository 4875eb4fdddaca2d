"""Which sequences change decode workers to even out memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.router import PLENTY, RELIEVED, SHORT, DecodeView, Running, Transfer, rebalance
from tests.support.fake_workers import LAYOUT

#: Sequences at each worker before any is moved.
RUNNING = 50


def view(address: str, block_size: int, num_blocks: int, available: int, places: int) -> DecodeView:
    """A worker that runs `places` further sequences."""
    return DecodeView(
        address,
        max_model_len=1024,
        max_local_prefill_tokens=0,
        layout=replace(LAYOUT, block_size=block_size),
        num_blocks=num_blocks,
        num_available_blocks=available,
        num_sequences=RUNNING,
        max_num_seqs=RUNNING + places,
    )


@st.composite
def memories(draw: st.DrawFn) -> list[DecodeView]:
    found = []
    for number in range(draw(st.integers(0, 5))):
        num_blocks = draw(st.integers(1, 200))
        available = draw(st.integers(-3, num_blocks))
        block_size = draw(st.sampled_from([4, 16]))
        places = draw(st.integers(-1, 6))
        found.append(view(f"d{number}", block_size, num_blocks, available, places))
    return found


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[DecodeView], list[Running]]:
    found = draw(memories())
    addresses = [memory.address for memory in found] + ["elsewhere"]
    sequences = [
        Running(
            key,
            draw(st.sampled_from(addresses)),
            (draw(st.integers(-1, 1)), key, "r", 0),
            draw(st.integers(1, 300)),
        )
        for key in range(draw(st.integers(0, 12)))
    ]
    return found, sequences


def after(
    found: Sequence[DecodeView], sequences: Sequence[Running], transfers: Sequence[Transfer]
) -> tuple[list[DecodeView], list[Running]]:
    """When the transfers are done."""
    by_address = {memory.address: memory for memory in found}
    placed = {sequence.key: sequence for sequence in sequences}
    for transfer in transfers:
        sequence = placed[transfer.key]
        owner, target = by_address[sequence.address], by_address[transfer.address]
        by_address[owner.address] = replace(
            owner,
            num_available_blocks=owner.num_available_blocks + sequence.num_blocks_at(owner),
            num_sequences=owner.num_sequences - 1,
        )
        by_address[target.address] = replace(
            target,
            num_available_blocks=target.num_available_blocks - sequence.num_blocks_at(target),
            num_sequences=target.num_sequences + 1,
        )
        placed[transfer.key] = replace(sequence, address=target.address)
    return list(by_address.values()), list(placed.values())


@given(fleets(), st.integers(0, 8))
def test_only_short_workers_are_relieved_and_only_by_roomy_ones(
    fleet: tuple[list[DecodeView], list[Running]], max_transfers: int
) -> None:
    found, sequences = fleet
    transfers = rebalance(found, sequences, max_transfers)
    assert len(transfers) <= max_transfers
    assert len({transfer.key for transfer in transfers}) == len(transfers)
    before = {memory.address: memory for memory in found}
    now = {memory.address: memory for memory in after(found, sequences, transfers)[0]}
    for transfer in transfers:
        owner, target = before[sequences[transfer.key].address], now[transfer.address]
        assert owner.num_available_blocks < SHORT * owner.num_blocks
        assert target.num_available_blocks >= PLENTY * target.num_blocks
        assert target.num_sequences <= target.max_num_seqs


@given(fleets())
def test_the_worst_ranked_go_first_and_no_more_than_needed(
    fleet: tuple[list[DecodeView], list[Running]],
) -> None:
    found, sequences = fleet
    transfers = rebalance(found, sequences, 100)
    ranks = [sequences[transfer.key].rank for transfer in transfers]
    assert ranks == sorted(ranks, reverse=True)
    for count in range(len(transfers)):
        owner = sequences[transfers[count].key].address
        part = {m.address: m for m in after(found, sequences, transfers[:count])[0]}[owner]
        assert part.num_available_blocks < RELIEVED * part.num_blocks


@given(fleets())
def test_nothing_is_moved_back(fleet: tuple[list[DecodeView], list[Running]]) -> None:
    """Again and again, until there is nothing to move: no sequence comes back to where it was."""
    found, sequences = fleet
    homes = {sequence.key: {sequence.address} for sequence in sequences}
    for _ in range(len(sequences) + 1):
        transfers = rebalance(found, sequences, 100)
        for transfer in transfers:
            assert transfer.address not in homes[transfer.key]
            homes[transfer.key].add(transfer.address)
        found, sequences = after(found, sequences, transfers)
    assert rebalance(found, sequences, 100) == []


def test_a_short_worker_is_relieved_of_its_worst() -> None:
    found = [view("full", 4, 100, 5, 0), view("roomy", 4, 100, 90, 8)]
    sequences = [Running(key, "full", (0, key, "r", 0), 39) for key in range(6)]
    assert rebalance(found, sequences, 8) == [Transfer(5, "roomy"), Transfer(4, "roomy")]
    assert rebalance(found, sequences, 1) == [Transfer(5, "roomy")]
