"""Steps launched before the previous step's tokens are known: the same samples, and faults reported
late."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.errors import EngineFault
from baton.types import Sampling
from baton_kernels.host_copy import Fence
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.torch import engine as torch_engine
from engine.torch.engine import TorchEngine
from tests.support.drive_engine import generate, generate_ahead, next_token, whole_prompt

MakeEngine = Callable[..., TorchEngine]

PROMPTS = [tuple(range(seed, seed + 5 + 4 * seed)) for seed in range(4)]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=5, logprobs=3),
    Sampling(
        temperature=1.2, seed=6, logit_bias={7: 2.0}, min_tokens=3, stop_token_ids=frozenset({9})
    ),
    Sampling(logprobs=0),
]


def blocks(place: int) -> range:
    return range(8 * place, 8 * place + 8)


def first_slice(place: int, sampling: Sampling) -> SequenceSlice:
    return whole_prompt(PROMPTS[place], sampling, blocks(place))


def following(place: int, row: int, sampling: Sampling) -> SequenceSlice:
    prompt = PROMPTS[place]
    return next_token(prompt, len(prompt), sampling, blocks(place), row)


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_samples_are_those_of_steps_one_after_the_other(
    tiny_engine: MakeEngine, family: str
) -> None:
    engine = tiny_engine(family)
    expected = generate(engine, PROMPTS, SAMPLINGS, 12)
    assert generate_ahead(engine, PROMPTS, SAMPLINGS, 12) == expected


@pytest.mark.usefixtures("each_level")
def test_a_sequence_may_come_in_and_another_leave_between_two_launches(
    tiny_engine: MakeEngine,
) -> None:
    engine = tiny_engine()
    # The same batches one after the other: without native kernels a batch has a part in how its
    # rows are rounded.
    both = Batch((first_slice(0, SAMPLINGS[0]), first_slice(1, SAMPLINGS[1])))
    first = engine.forward(both)
    token_id = first[1][0].token_id
    row = SampleRow(0, SAMPLINGS[1], (*PROMPTS[1], token_id), len(PROMPTS[1]))
    known = SequenceSlice((token_id,), len(PROMPTS[1]), blocks(1), (row,))
    second = engine.forward(Batch((first_slice(2, SAMPLINGS[2]), known)))
    before = engine.launch(both)
    after = engine.launch(Batch((first_slice(2, SAMPLINGS[2]), following(1, 1, SAMPLINGS[1]))))
    assert before.samples() == first
    assert after.samples() == second


def test_what_a_broken_row_drew_can_be_followed_and_both_launches_tell_of_it(
    tiny_engine: MakeEngine,
) -> None:
    engine = tiny_engine()
    expected = generate(engine, PROMPTS[1:2], SAMPLINGS[1:2], 2, first_block=8)[0]
    known = PROMPTS[0]
    part = first_slice(0, SAMPLINGS[0])
    engine.forward(Batch((part._replace(token_ids=known[:4], rows=()),)))
    engine.kv.tensor[0] = float("nan")
    last = part._replace(token_ids=known[4:], start=4, rows=(part.rows[0]._replace(offset=0),))
    before = engine.launch(Batch((last, first_slice(1, SAMPLINGS[1]))))
    after = engine.launch(Batch((following(0, 0, SAMPLINGS[0]), following(1, 1, SAMPLINGS[1]))))
    for launched in (before, after):
        with pytest.raises(EngineFault) as caught:
            launched.samples()
        assert caught.value.metadata["slices"] == "0"
    # The other one's KV is whole: it goes on as if nothing had been.
    row = SampleRow(0, SAMPLINGS[1], (*PROMPTS[1], expected[0].token_id), len(PROMPTS[1]))
    again = SequenceSlice((expected[0].token_id,), len(PROMPTS[1]), blocks(1), (row,))
    assert engine.forward(Batch((again,))) == ((expected[1],),)


def test_nothing_follows_a_row_that_is_not_of_the_launch_just_before(
    tiny_engine: MakeEngine,
) -> None:
    engine = tiny_engine()
    part = following(0, 0, SAMPLINGS[0])
    with pytest.raises(EngineFault):
        engine.launch(Batch((part,)))
    engine.forward(Batch((first_slice(0, SAMPLINGS[0]),)))
    with pytest.raises(EngineFault):
        engine.launch(Batch((part._replace(follows=1),)))
    # A step cannot follow a failed launch, either.
    with pytest.raises(EngineFault):
        engine.launch(Batch((part,)))


def test_a_batch_is_the_callers_again_when_the_launch_returns(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine()
    expected = generate(engine, PROMPTS[:1], SAMPLINGS[1], 1)[0]
    tokens, table = list(PROMPTS[0]), list(blocks(0))
    row = SampleRow(4, SAMPLINGS[1], tokens, len(tokens))
    launched = engine.launch(Batch((SequenceSlice(tuple(tokens), 0, table, (row,)),)))
    tokens.append(3)
    table.clear()
    assert launched.samples() == ((expected[0],),)


@pytest.mark.parametrize(("num_rows", "num_waits"), [(1, 0), (0, 1)])
def test_a_step_that_draws_nothing_is_waited_for_by_its_end(
    tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, num_rows: int, num_waits: int
) -> None:
    """As a prompt's first chunks are: nothing of them comes to the host."""
    waits = []

    class Watched(Fence):
        def wait(self) -> None:
            waits.append(self)

    monkeypatch.setattr(torch_engine, "Fence", Watched)
    part = first_slice(0, SAMPLINGS[0])
    launched = tiny_engine().launch(Batch((part._replace(rows=part.rows[:num_rows]),)))
    assert not waits
    assert len(launched.samples()[0]) == num_rows
    assert len(waits) == num_waits
