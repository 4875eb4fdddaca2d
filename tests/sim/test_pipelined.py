"""Steps on an engine of several pipeline stages: as many launches as stages, of different work. The
properties over many requests are those of steps launched ahead: test_launched_ahead.py,
test_prompts_ahead.py and test_mix.py draw the number of stages."""

from __future__ import annotations

import pytest

from baton.commands import Abort
from baton.types import FinishReason, Sampling, SequenceSpec
from tests.sim.test_launched_ahead import World, plain
from tests.sim.test_prompts_ahead import World as PrefillWorld
from tests.sim.test_prompts_ahead import prompt_of
from tests.support.sim_tiers import SimShape
from worker_core.commands import StreamCommand
from worker_core.scheduler import Budget


def world_of(num_stages: int, *, budget: int = 32, **shape: int) -> World:
    return World(
        SimShape(num_blocks=200, num_stages=num_stages, max_num_batched_tokens=budget, **shape)
    )


def check(world: World) -> None:
    for handle, tokens in world.told.items():
        assert tokens == world.expected(handle)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("prompt_logprobs", [-1, 2])
def test_chunks_of_one_prompt_are_in_all_stages(num_stages: int, prompt_logprobs: int) -> None:
    world = world_of(num_stages, budget=8 * num_stages)
    sampling = Sampling(max_tokens=2, prompt_logprobs=prompt_logprobs)
    world.open(SequenceSpec("a", tuple(range(64)), sampling))
    most = 0
    while 1 not in world.ends:
        world.step()
        most = max(most, len(world.watch.in_flight))
    assert most == num_stages - 1
    chunks = [part.start for batch in world.watch.launches[:8] for part in batch.slices]
    assert chunks == list(range(0, 64, 8))
    # The first token is awaited, and so is the second.
    assert world.watch.num_ahead == 7 * (num_stages - 1) - (num_stages - 1) * (num_stages - 2) // 2
    check(world)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_sequences_are_divided_among_launches_in_turn(num_stages: int) -> None:
    world = world_of(num_stages)
    for number in range(5):
        world.open(plain(f"r{number}", number, max_tokens=20))
    world.run()
    check(world)
    sizes = [len(batch.slices) for batch in world.watch.launches[num_stages : 5 * num_stages]]
    assert max(sizes) <= -(-5 // num_stages)
    # Each stage's turn serves all: nobody waits for more than a round.
    for at in range(num_stages, 5 * num_stages):
        turn = world.watch.launches[at : at + num_stages + 1]
        assert {part.key for batch in turn for part in batch.slices} == {
            (0, handle) for handle in world.specs
        }


def test_requests_that_must_know_their_tokens_run_beside_others() -> None:
    world = world_of(2)
    world.open(SequenceSpec("a", (5, 6), Sampling(max_tokens=9, presence_penalty=0.5)))
    world.open(SequenceSpec("b", (1, 2, 3), Sampling(max_tokens=9, prompt_logprobs=2)))
    world.run()
    check(world)
    assert world.watch.num_ahead > 12


def test_a_fault_of_one_launch_fails_its_request_alone() -> None:
    poison = 777
    world = World(SimShape(num_blocks=200, num_stages=3, poison_token_id=poison))
    world.open(plain("good", *range(70)))
    world.open(plain("bad", 5, poison, 6))
    world.open(plain("other", 8, 9))
    world.run()
    assert world.ends == {1: FinishReason.LENGTH, 2: "ENGINE_FAULT", 3: FinishReason.LENGTH}
    assert not world.told.pop(2)
    check(world)
    assert world.watch.num_ahead > 10, "after the fault, launches overlap again"


def test_a_prompt_given_up_with_chunks_in_flight_keeps_its_blocks_until_the_last() -> None:
    world = world_of(4, budget=16)
    world.open(plain("a", *range(60)))
    for _ in range(4):
        world.step()
    assert len(world.watch.in_flight) == 3
    world.submit(StreamCommand(0, 1, Abort()))
    other = world.open(plain("b", 4, 5))
    world.ends[1] = "given up"
    world.step()
    assert world.decoder.pool.counts().leased > 4
    world.run()
    assert world.told[other] == world.expected(other)


def test_layers_of_later_stages_are_sent_when_a_launch_is_collected() -> None:
    world = PrefillWorld(SimShape(max_num_batched_tokens=16, num_stages=2))
    handle = world.open(prompt_of(20))
    sent: list[int] = []
    for _ in range(3):
        world.step()
        sent.append(len(world.worker.eager.read.get((0, handle), {})))
    # Chunks of 8, 8 and 4 tokens in 4 layers: the first one whole, then the next one, and the last
    # one's layers of the first stage.
    assert sent == [0, 8 * 4, 16 * 4 + 4 * 2]
    world.run()
    world.check(handle)


def test_a_launch_has_its_share_of_a_step() -> None:
    whole = Budget(2048, 2048, prompts_first=True)
    assert whole.of_launch(2, 5, 4096) == Budget(1024, 512, True, 3)
    assert whole.of_launch(4, 0, 0) == Budget(512, 128, True, 0)
    assert whole.of_launch(2, 1, 1 << 20).num_prefill_tokens == 1024
    assert Budget(64, 9).of_launch(2, 0, 4096).num_prefill_tokens == 9
