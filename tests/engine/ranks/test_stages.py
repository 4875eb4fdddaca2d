"""Stages receive exactly what was sent, in order, over every backend. Each rank is a thread."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ranks.backends import BACKENDS
from engine.ranks.exchange import ExchangeFailed
from engine.ranks.mesh import Degrees
from engine.ranks.stages import OneStage, Stages
from tests.support.rank_specs import rank_spec

#: NCCL needs GPUs.
NAMES = ("shm", "gloo")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_ROWS = 20


def joined(name: str, degrees: Degrees, dtype: str = "float32") -> list[Stages]:
    """The links of all ranks of an engine. name: of their backend."""
    backend = BACKENDS[name]()
    spec = backend.open(rank_spec(degrees, name, max_num_rows=NUM_ROWS, dtype=dtype))

    def join(rank: int) -> Stages:
        return BACKENDS[name]().stages(replace(spec, rank=rank))

    try:
        with ThreadPoolExecutor(degrees.num_ranks) as threads:
            return list(threads.map(join, range(degrees.num_ranks)))
    finally:
        for fd in spec.fds:
            os.close(fd)


def states(num_rows: int, number: int, dtype: torch.dtype, hidden: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(num_rows, hidden, generator=generator).to(dtype)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=15)
@given(
    degrees=st.sampled_from([Degrees(1, 2), Degrees(2, 2), Degrees(1, 3)]),
    lengths=st.lists(st.integers(0, 3 * NUM_ROWS), min_size=1, max_size=12),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_messages_go_around_the_ring_in_order(
    name: str, degrees: Degrees, lengths: list[int], dtype: str
) -> None:
    """They may be longer than what a link holds, or empty."""
    links = joined(name, degrees, dtype)
    hidden = rank_spec(degrees, name).config.hidden_size

    def run(rank: int) -> list[torch.Tensor]:
        own, found = links[rank], []
        for number, length in enumerate(lengths):
            if own.stage.is_first:
                own.send(states(length, number, DTYPES[dtype], hidden) + rank)
            received = torch.empty(length, hidden, dtype=DTYPES[dtype])
            own.receive(received)
            found.append(received)
            if not own.stage.is_first:
                own.send(received * 2)
        return found

    with ThreadPoolExecutor(degrees.num_ranks) as threads:
        found = list(threads.map(run, range(degrees.num_ranks)))
    for ring in degrees.pipelines():
        first = [states(n, i, DTYPES[dtype], hidden) + ring[0] for i, n in enumerate(lengths)]
        for stage, rank in enumerate((*ring[1:], ring[0])):
            wanted = [each * 2**stage for each in first]
            assert all(torch.equal(*pair) for pair in zip(found[rank], wanted, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_sends_all_launches_before_any_is_received(name: str) -> None:
    first, second = joined(name, Degrees(pipeline=2))
    hidden = rank_spec(Degrees(), name).config.hidden_size
    sent = [states(NUM_ROWS // 2, number, torch.float32, hidden) for number in range(2)]
    for each in sent:
        first.send(each)
    for each in sent:
        received = torch.empty_like(each)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(second.receive, received).result(10)
        assert torch.equal(received, each)


@pytest.mark.parametrize("call", ["send", "receive"])
def test_a_stage_that_is_gone_fails_the_exchange_over_gloo(call: str) -> None:
    links = joined("gloo", Degrees(pipeline=2))
    del links[1]
    message = torch.ones(2, rank_spec(Degrees(), "gloo").config.hidden_size)
    # The first messages may be sent before the end is noticed.
    with pytest.raises(ExchangeFailed):
        list(map(getattr(links[0], call), repeat(message, 1000)))


@pytest.mark.parametrize("name", NAMES)
def test_without_a_pipeline_there_are_no_links(name: str) -> None:
    assert all(isinstance(links, OneStage) for links in joined(name, Degrees(2)))
