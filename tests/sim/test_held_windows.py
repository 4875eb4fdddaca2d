"""Workers of a model whose layers are all windowed hold the blocks of the window, and of what a
step computes: never those of the whole sequence. What is drawn is as ever: see test_mix.py."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from baton.engine.oracle import OracleWindow
from baton.types import Sampling, SequenceSpec
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.mixed_requests import expected_outputs
from tests.support.random_speculation import RandomSpeculation
from tests.support.sim_client import SimClient
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape

BLOCK, CHUNK, WINDOW = 4, 8, OracleWindow(10, has_full_layers=False)
REQUEST = SequenceSpec("r", tuple(range(1, 201)), Sampling(max_tokens=100))
#: What a sequence that decodes has: the window, and what rounds it to blocks at both ends.
MOST_DECODING = -(-WINDOW.num_tokens // BLOCK) + 2
#: One that comes back to a worker begins at the window of the prefix that is cached there.
MOST_COMING_BACK = MOST_DECODING + -(-WINDOW.num_tokens // BLOCK)
#: Two chunks may be in flight.
MOST_PREFILLING = MOST_DECODING + 2 * -(-CHUNK // BLOCK)


class WatchedClient(SimClient):
    """most: blocks that each worker has had leased, by name."""

    most: Counter[str]

    def check_integrity(self) -> None:
        super().check_integrity()
        for worker in (*self.prefills, *self.decodes):
            self.most[worker.name] = max(self.most[worker.name], worker.pool.counts().leased)


def make_client(
    move_rate: float = 0.0, *, num_decodes: int = 1, drafts: bool = False, num_local: int = 0
) -> WatchedClient:
    client, hub = WatchedClient(random.Random(1), [], [], move_rate), LoopbackHub()
    client.most = Counter()
    shape = SimShape(
        num_blocks=100,
        block_size=BLOCK,
        max_num_batched_tokens=CHUNK,
        max_local_prefill_tokens=num_local,
        window=WINDOW,
    )
    client.prefills.append(SimPrefill(hub, lambda: client.now, shape, "p0"))
    for index in range(num_decodes):
        speculation = RandomSpeculation(7, window=WINDOW) if drafts else None
        worker = SimDecode(hub, lambda: client.now, shape, f"d{index}", speculation=speculation)
        client.decodes.append(worker)
    return client


def serve(client: WatchedClient, most_decoding: int) -> None:
    """The request gets its tokens, and the workers' blocks stay within what their part takes."""
    client.waiting.append(REQUEST)
    client.run()
    client.quiet()
    (expected,) = expected_outputs(REQUEST, WINDOW)
    assert client.output_of(expected.choice) == expected.token_ids
    for worker in client.prefills:
        assert client.most[worker.name] <= MOST_PREFILLING
    for worker in client.decodes:
        assert 0 < client.most[worker.name] <= most_decoding


@pytest.mark.parametrize("drafts", [False, True])
def test_a_long_sequence_that_is_handed_over(drafts: bool) -> None:
    client = make_client(drafts=drafts)
    serve(client, MOST_DECODING)
    assert client.most["p0"] > 0


def test_a_long_sequence_that_moves() -> None:
    client = make_client(move_rate=0.1, num_decodes=2)
    serve(client, MOST_COMING_BACK)


def test_a_long_prompt_that_is_computed_where_it_decodes() -> None:
    client = make_client(num_local=len(REQUEST.prompt_token_ids))
    serve(client, MOST_PREFILLING)
    assert client.most["p0"] == 0
