"""Models with slots for their windowed layers, as many as the windows take: the tokens are those of
one pool, and of transformers, whatever happens to a sequence."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.types import BeamParams, EarlyStopping, Sampling, SequenceSpec
from engine.kv.groups.window import WINDOWED
from engine.torch.engine import TorchEngine
from kv_transfer.transport.loopback import LoopbackHub
from tests.engine.conftest import MakeModel
from tests.support.engines import load_engine
from tests.support.random_speculation import RandomSpeculation
from tests.support.sim_client import Choice, SimClient
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape
from tests.support.tiny_models import Family
from tests.support.transformers_greedy import greedy_outputs
from worker_core.speculation.interface import DraftRequest

WINDOW, NUM_TOKENS, VOCAB = 11, 14, 250
#: By family: settings, and windowed layers. Native code runs all layers of the last one in one
#: call.
CASES: dict[Family, tuple[dict[str, Any], int]] = {
    "gemma3_text": (
        {
            "num_hidden_layers": 6,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"],
            "query_pre_attn_scalar": 24,
        },
        5,
    ),
    "gpt_oss": ({"num_hidden_layers": 3}, 2),
    "qwen2": (
        {"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3},
        2,
    ),
}
COMMON = list(range(60, 100))
PROMPTS = [
    [*COMMON, 5, 200, 33],
    [7, 8, 9] * 20,
    COMMON[:21],
    [i * 7 % VOCAB for i in range(71)],
    [*COMMON, 11],
    [40],
]


def shape(*, is_decode: bool) -> SimShape:
    return SimShape(
        # Fewer than the sequences want, so that they are swapped, or placed anew.
        num_blocks=36 if is_decode else 40,
        block_size=4 if is_decode else 8,
        max_num_seqs=5,
        max_num_batched_tokens=16,
        max_local_prefill_tokens=3,
        swap_bytes=40_000,
        min_fetched_tokens=1,
    )


def engine_of(model: Path, own: SimShape, *, frees_windows: bool) -> TorchEngine:
    return load_engine(
        str(model),
        dtype="float32",
        num_blocks=own.num_blocks,
        block_size=own.block_size,
        max_num_seqs=own.max_num_seqs,
        max_num_batched_tokens=own.max_num_batched_tokens,
        num_threads=1,
        frees_windows=frees_windows,
        on_plan=lambda _: None,
        progress=lambda _: None,
    )


class KnownOutputs(RandomSpeculation):
    """Guesses around what sequences get in the end, by their prompts and choices."""

    def __init__(self, seed: int, right: Mapping[Hashable, list[int]]) -> None:
        super().__init__(seed, VOCAB)
        self._right = right

    def _output(self, request: DraftRequest) -> list[int]:
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        return list(self._right.get((prompt, request.choice), ()))


def requests() -> list[SequenceSpec]:
    """Greedy ones, first; then choices, and beams."""
    greedy = Sampling(temperature=0.0, max_tokens=NUM_TOKENS)
    seeded = Sampling(temperature=0.9, seed=5, max_tokens=NUM_TOKENS)
    beam = BeamParams(3, 1.0, EarlyStopping.NEVER, 2)
    beams = Sampling(max_tokens=NUM_TOKENS, beam=beam)
    specs = [
        SequenceSpec(f"r{index}", tuple(prompt), greedy, arrival_ns=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    choices = SequenceSpec("n", tuple(COMMON[3:]), seeded, arrival_ns=7, num_choices=3)
    searched = SequenceSpec("b", tuple(COMMON[:33]), beams, arrival_ns=8, num_choices=2)
    return [*specs, choices, searched]


def serve(client: SimClient, specs: list[SequenceSpec]) -> dict[Choice, list[int]]:
    client.waiting += specs
    client.run()
    client.quiet()
    assert not client.failed
    return {
        Choice(spec.request_id, choice): client.output_of(Choice(spec.request_id, choice))
        for spec in specs
        for choice in range(spec.num_choices)
    }


def alone(model: Path) -> dict[Choice, list[int]]:
    """What each request gets on one worker that holds all KV, one at a time."""
    own = SimShape(num_blocks=90, block_size=4, max_local_prefill_tokens=200)
    engine = engine_of(model, own, frees_windows=False)
    assert not engine.kv.slot_tables
    client, hub = SimClient(random.Random(0), [], []), LoopbackHub()
    client.decodes.append(SimDecode(hub, lambda: client.now, own, given_engine=engine))
    client.prefills.append(SimPrefill(hub, lambda: client.now))  # of which nothing is asked
    found: dict[Choice, list[int]] = {}
    for spec in requests():
        found |= serve(client, [spec])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_tokens_are_those_of_one_pool_and_of_transformers(
    family: Family, tiny_model: MakeModel
) -> None:
    settings, num_windowed = CASES[family]
    model = tiny_model(family, sliding_window=WINDOW, **settings)
    expected = alone(model)
    right = {
        (spec.prompt_token_ids, choice): expected[Choice(spec.request_id, choice)]
        for spec in requests()
        for choice in range(spec.num_choices)
    }
    hub, rng = LoopbackHub(), random.Random(3)
    client = SimClient(rng, [], [], move_rate=0.05)
    own = shape(is_decode=False)
    engines = [engine_of(model, own, frees_windows=True)]
    client.prefills.append(SimPrefill(hub, lambda: client.now, own, given_engine=engines[0]))
    for index in range(2):
        own = shape(is_decode=True)
        engines.append(engine_of(model, own, frees_windows=True))
        drafts = KnownOutputs(index, right) if index else None
        worker = SimDecode(
            *(hub, lambda: client.now, own, f"d{index}"),
            speculation=drafts,
            given_engine=engines[-1],
        )
        client.decodes.append(worker)
    for engine in engines:
        slots, layout = engine.kv.slot_tables[WINDOWED], engine.spec.layout
        assert len(layout.windowed_layers) == num_windowed
        assert slots.num_slots < engine.spec.num_blocks
    assert serve(client, requests()) == expected
    turns = [
        SequenceSpec(f"t{index}", (*prompt, *expected[Choice(f"r{index}", 0)], 3, 1), sampling)
        for index, prompt in enumerate(PROMPTS[:4])
        for sampling in (Sampling(temperature=0.0, max_tokens=NUM_TOKENS),)
    ]
    continued = serve(client, turns)
    greedy = greedy_outputs(model, [spec.prompt_token_ids for spec in turns], NUM_TOKENS)
    assert [continued[Choice(spec.request_id, 0)] for spec in turns] == greedy
    assert [expected[Choice(f"r{i}", 0)] for i in range(len(PROMPTS))] == greedy_outputs(
        model, PROMPTS, NUM_TOKENS
    )
    assert client.num_accepted > 0
    assert client.seen >= {"Committed", "HandedOff", "Paused", "Prefilled"}
    num_swaps = sum(worker.swap.num_swaps for worker in client.decodes)
    assert num_swaps or "Preempted" in client.seen
