"""One forward for prefill, decode and verification: what a slice gives depends on that slice
alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from baton.errors import EngineFault
from baton.types import Sampling
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.torch.engine import TorchEngine
from tests.support.drive_engine import generate, token_ids

MakeEngine = Callable[..., TorchEngine]

SAMPLED = Sampling(
    temperature=0.9,
    top_k=50,
    top_p=0.95,
    min_p=0.001,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    seed=1234,
)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 256, (length,), generator=generator).tolist())


def row(tokens: tuple[int, ...], offset: int, sampling: Sampling | None = None) -> SampleRow:
    return SampleRow(offset, sampling or Sampling(), tokens, len(tokens))


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("window", [None, 6])
def test_verification_gives_what_single_steps_give(
    tiny_engine: MakeEngine, sampling: Sampling, window: int | None
) -> None:
    engine = tiny_engine("mistral", block_size=4, sliding_window=window)
    first = prompt(19)
    output = token_ids(generate(engine, [first], sampling, 9))[0]
    for others in (0, 3):
        # The last prompt token and eight outputs as drafts, in one slice with a row after each.
        tokens = first + tuple(output)
        drafts = tokens[len(first) - 1 : -1]
        rows = tuple(
            SampleRow(i, sampling, tokens[: len(first) + i], len(first)) for i in range(len(drafts))
        )
        slices = [SequenceSlice(drafts, len(first) - 1, range(6, -1, -1), rows)]
        for i in range(others):
            extra = prompt(9, seed=i)
            table = range(20 + 4 * i, 24 + 4 * i)
            slices.append(SequenceSlice(extra, 0, table, (row(extra, 8),)))
        samples = engine.forward(Batch(tuple(slices)))[0]
        assert [sample.token_id for sample in samples] == output


def test_logits_do_not_depend_on_the_batch(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine(block_size=4, num_blocks=128)
    lengths = (1, 2, 5, 16, 17, 40, 3, 33)
    slices = []
    for i, length in enumerate(lengths):
        tokens = prompt(length, seed=i)
        table = range(i * 12, i * 12 + 12)
        slices.append(SequenceSlice(tokens, 0, table, (row(tokens, length - 1),)))
    together = engine.logits(Batch(tuple(slices)))
    alone = torch.cat([engine.logits(Batch((part,))) for part in slices])
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=0)


def test_sampled_tokens_do_not_depend_on_batch_or_chunks(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine(block_size=4, num_blocks=128)
    prompts = [prompt(n, seed=n) for n in (5, 30, 12)]
    together = generate(engine, prompts, SAMPLED, 10, chunk_tokens=7)
    alone = [generate(engine, [p], SAMPLED, 10)[0] for p in prompts]
    assert token_ids(together) == token_ids(alone)


def test_what_an_earlier_owner_left_is_never_read(tiny_engine: MakeEngine) -> None:
    prompts = [prompt(n, seed=n) for n in (1, 3, 30, 8, 17)]
    for window in (None, 5):
        engine = tiny_engine("mistral", block_size=8, sliding_window=window)
        clean = token_ids(generate(engine, prompts, Sampling(), 8, chunk_tokens=11))
        engine.kv.tensor.fill_(float("nan"))
        assert token_ids(generate(engine, prompts, Sampling(), 8, chunk_tokens=11)) == clean


def test_a_broken_sequence_fails_alone(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine(block_size=4)
    prompts = [prompt(10, seed=i) for i in range(3)]
    slices = []
    for i, tokens in enumerate(prompts):
        table = range(i * 4, i * 4 + 4)
        engine.forward(Batch((SequenceSlice(tokens[:9], 0, table),)))
        slices.append(SequenceSlice(tokens[9:], 9, table, (row(tokens, 0),)))
    healthy = engine.forward(Batch((slices[0], slices[2])))
    engine.kv.tensor[4, 1] = float("inf")
    with pytest.raises(EngineFault) as caught:
        engine.forward(Batch(tuple(slices)))
    assert caught.value.metadata["slices"] == "1"
    assert engine.forward(Batch((slices[0], slices[2]))) == healthy


@pytest.mark.parametrize(
    "part",
    [
        SequenceSlice((), 0, (0,)),
        SequenceSlice((1,), -1, (0,)),
        SequenceSlice((1,) * 9, 0, (0, 1)),
        SequenceSlice((1,), 0, (64,)),
        SequenceSlice((1,), 0, (-1,)),
        SequenceSlice((259,), 0, (0,)),
        SequenceSlice((-1,), 0, (0,)),
        SequenceSlice((1,), 256, range(64)),
        SequenceSlice((1,), 0, (0,), (row((1,), 1),)),
        SequenceSlice((1,), 0, (0,), (row((1,), 0, Sampling(logit_bias={259: 1.0})),)),
        SequenceSlice((1,), 0, (0,), (row((1,), 0, Sampling(stop_token_ids=frozenset({-1}))),)),
    ],
)
def test_a_slice_outside_its_own_is_refused_before_anything_is_written(
    tiny_engine: MakeEngine, part: SequenceSlice
) -> None:
    engine = tiny_engine(block_size=4)
    good = SequenceSlice((5,), 0, (9,), (row((5,), 0),))
    with pytest.raises(EngineFault) as caught:
        engine.forward(Batch((good, part, good)))
    assert caught.value.metadata["slices"] == "1"
    assert not engine.kv.tensor.any()


@pytest.mark.slow
def test_layers_are_told_in_order_once_written(tiny_engine: MakeEngine) -> None:
    for num_layers, group_size in ((1, 4), (2, 1), (5, 2), (8, 4)):
        engine = tiny_engine(
            block_size=4, num_hidden_layers=num_layers, layer_group_size=group_size
        )
        tokens = prompt(9)
        seen: list[tuple[int, int, torch.Tensor]] = []

        def hook(
            first: int,
            count: int,
            engine: TorchEngine = engine,
            seen: list[tuple[int, int, torch.Tensor]] = seen,
        ) -> None:
            layers = engine.kv.tensor[:3, first : first + count].clone()
            seen.append((first, count, layers))

        engine.forward(Batch((SequenceSlice(tokens, 0, (0, 1, 2)),)), hook)
        told = [layer for first, count, _ in seen for layer in range(first, first + count)]
        assert told == list(range(num_layers))
        assert len(seen) == -(-num_layers // group_size)
        for first, count, layers in seen:
            assert torch.equal(layers, engine.kv.tensor[:3, first : first + count])
            assert layers[:2].abs().sum(dim=(2, 3, 4, 5)).all()


def test_empty_batches_and_slices_without_rows(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine()
    assert engine.forward(Batch(())) == ()
    assert engine.forward(Batch((SequenceSlice((1, 2), 0, (0,)),))) == ((),)
