"""Workers of a model with windowed layers only hold the blocks of the window and of the tokens that
a step computes, never those of the whole sequence. With full layers, too, they hold that many slots
for windowed layers. Requests are drawn as in test_mix.py."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from baton.types import Sampling, SequenceSpec
from engine.oracle import OracleLayers
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.mixed_requests import expected_outputs
from tests.support.random_speculation import RandomSpeculation
from tests.support.sim_client import SimClient
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape

BLOCK, CHUNK, WINDOW = 4, 8, 10
REQUEST = SequenceSpec("r", tuple(range(1, 201)), Sampling(max_tokens=100))
#: What a sequence that decodes has: the window, and what rounds it to blocks at both ends.
MOST_DECODING = -(-WINDOW // BLOCK) + 2
#: One that comes back to a worker begins at the window of the prefix that is cached there.
MOST_COMING_BACK = MOST_DECODING + -(-WINDOW // BLOCK)
#: Two chunks may be in flight.
MOST_PREFILLING = MOST_DECODING + 2 * -(-CHUNK // BLOCK)


class WatchedClient(SimClient):
    """most: blocks that each worker has had leased, by name, or slots where it has such;
    most_blocks: of any of them."""

    most: Counter[str]
    most_blocks: int = 0

    def check_integrity(self) -> None:
        super().check_integrity()
        for worker in (*self.prefills, *self.decodes):
            blocks = worker.pool.counts().leased
            held = worker.slots.counts().leased if worker.slots else blocks
            self.most[worker.name] = max(self.most[worker.name], held)
            self.most_blocks = max(self.most_blocks, blocks)


@pytest.fixture(params=[False, True], ids=["all", "some"])
def layers(request: pytest.FixtureRequest) -> OracleLayers:
    """Windowed layers only, or some, with KV in slots."""
    return OracleLayers(WINDOW, has_full_layers=request.param)


def make_client(
    layers: OracleLayers,
    move_rate: float = 0.0,
    *,
    num_decodes: int = 1,
    drafts: bool = False,
    num_local: int = 0,
) -> WatchedClient:
    client, hub = WatchedClient(random.Random(1), [], [], move_rate), LoopbackHub()
    client.most = Counter()
    shape = SimShape(
        num_blocks=100,
        block_size=BLOCK,
        max_num_batched_tokens=CHUNK,
        max_local_prefill_tokens=num_local,
        layers=layers,
        has_window_slots=layers.has_full_layers,
    )
    client.prefills.append(SimPrefill(hub, lambda: client.now, shape, "p0"))
    for index in range(num_decodes):
        speculation = RandomSpeculation(7, layers=layers) if drafts else None
        worker = SimDecode(hub, lambda: client.now, shape, f"d{index}", speculation=speculation)
        client.decodes.append(worker)
    return client


def serve(client: WatchedClient, layers: OracleLayers, most_decoding: int) -> None:
    """The request gets its tokens, and the workers' blocks, or slots, stay within what their part
    takes."""
    client.waiting.append(REQUEST)
    client.run()
    client.quiet()
    (expected,) = expected_outputs(REQUEST, layers)
    assert client.output_of(expected.choice) == expected.token_ids
    for worker in client.prefills:
        assert client.most[worker.name] <= MOST_PREFILLING
    for worker in client.decodes:
        assert 0 < client.most[worker.name] <= most_decoding
    if layers.has_full_layers:  # with all KV in the blocks
        num_tokens = len(REQUEST.prompt_token_ids) + len(expected.token_ids)
        assert client.most_blocks >= (num_tokens - 1) // BLOCK


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("drafts", [False, True])
def test_a_long_sequence_that_is_handed_over(layers: OracleLayers, drafts: bool) -> None:
    client = make_client(layers, drafts=drafts)
    serve(client, layers, MOST_DECODING)
    assert client.most["p0"] > 0


@pytest.mark.few_cases(1)
def test_a_long_sequence_that_moves(layers: OracleLayers) -> None:
    client = make_client(layers, move_rate=0.1, num_decodes=2)
    serve(client, layers, MOST_COMING_BACK)


@pytest.mark.few_cases(1)
def test_a_long_prompt_that_is_computed_where_it_decodes(layers: OracleLayers) -> None:
    client = make_client(layers, num_local=len(REQUEST.prompt_token_ids))
    serve(client, layers, MOST_PREFILLING)
    assert client.most["p0"] == 0
