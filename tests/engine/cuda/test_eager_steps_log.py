"""A decode step that is not replayed is logged with its reason, once each; a prompt's is not."""

from __future__ import annotations

import pytest
import torch

from baton.types import Sampling
from bench.stub_device import StubDeviceEngine
from engine.interface import Batch, SampleRow, SequenceSlice

MAX_LEN = 64 * 512


def part(start: int, num_new: int, num_rows: int = 1) -> SequenceSlice:
    rows = tuple(SampleRow(num_new - 1, Sampling(), (), 0) for _ in range(num_rows))
    return SequenceSlice((0,) * num_new, start, range(MAX_LEN // 16), rows)


def test_verification_of_drafts_is_replayed(caplog: pytest.LogCaptureFixture) -> None:
    engine = StubDeviceEngine(MAX_LEN // 16, 4, MAX_LEN, 1)
    engine.forward(Batch((part(9, 1, 2), part(9, 3))))
    assert engine.num_eager_steps == 0
    assert not caplog.records


@pytest.mark.parametrize(
    ("slices", "reason"),
    [
        ((part(9, 1), part(9, 10)), "it verifies more than 9 tokens"),
        ((part(20_000, 2),), "drafts of long ones"),
        ((part(9, 1), part(9, 2)), "graphs are of up to 2 new tokens"),
    ],
)
def test_a_decode_step_that_is_not_replayed_is_logged(
    caplog: pytest.LogCaptureFixture, slices: tuple[SequenceSlice, ...], reason: str
) -> None:
    engine = StubDeviceEngine(MAX_LEN // 16, 2, MAX_LEN, 1)
    for _ in range(2):
        engine.forward(Batch(slices))
    (record,) = caplog.records
    assert reason in record.message


@pytest.mark.parametrize("prompt", [part(0, 30), part(64, 30), part(64, 30, 0)])
def test_steps_of_prompts_and_replayed_ones_are_not(
    caplog: pytest.LogCaptureFixture, prompt: SequenceSlice
) -> None:
    engine = StubDeviceEngine(MAX_LEN // 16, 2, MAX_LEN, 1)
    engine.forward(Batch((prompt, part(9, 1))))
    assert engine.num_eager_steps == 1
    engine.forward(Batch((part(9, 1), part(9, 1))))
    assert engine.num_eager_steps == 1
    assert not caplog.records


def test_steps_run_eagerly_while_a_head_reads_their_states(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A head on a GPU gets the states of every step; without one steps are replayed again."""
    engine = StubDeviceEngine(MAX_LEN // 16, 2, MAX_LEN, 1)
    seen: list[torch.Tensor | None] = []
    engine.watch((), lambda _, states: seen.append(states))
    engine.forward(Batch((part(9, 1), part(9, 1))))
    assert engine.num_eager_steps == len(seen) == 1
    assert seen[0] is not None
    assert len(seen[0]) == 2
    (record,) = caplog.records
    assert "a draft head" in record.message
    engine.watch((), None)
    engine.forward(Batch((part(9, 1), part(9, 1))))
    assert engine.num_eager_steps == len(seen) == 1
