"""The decode core alone: what it tells of a sequence that was given up, and when it has no room."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.commands import Abort
from baton.events import Deferred, Failed, LocalPrefill, Offered, Tokens
from baton.types import BeamParams, KvSource, Sample, Sampling, SequenceSpec
from engine.interface import Batch, LayersDone
from engine.oracle import oracle_tokens
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.sim_tiers import SimDecode, SimShape
from worker_core.commands import Open, StreamCommand


def worker(**shape: int) -> SimDecode:
    return SimDecode(LoopbackHub(), lambda: 0.0, SimShape(max_num_launches=1, **shape))


def spec_of(name: str, num_tokens: int) -> SequenceSpec:
    return SequenceSpec(name, tuple(range(1, num_tokens + 1)), Sampling(max_tokens=50))


def test_nothing_is_told_of_a_sequence_after_it_was_given_up() -> None:
    decoder = worker()
    decoder.submit(Open(0, 1, spec_of("a", 10), KvSource.PREFILL))
    (offered,) = decoder.step().events
    assert isinstance(offered.event, Offered)
    decoder.submit(StreamCommand(0, 1, Abort()))
    assert not decoder.step().events
    assert decoder.inbox, "the ticket's end is on its way to the core"
    assert not decoder.step().events
    assert decoder.pool.counts().leased == 0


def test_a_new_sequence_waits_while_the_running_ones_need_the_blocks_that_are_left() -> None:
    decoder = worker(num_blocks=10)
    # Two sequences of 4 blocks each leave 2: one block for each of them to grow into, none for a
    # third.
    for handle in (1, 2):
        decoder.submit(Open(0, handle, spec_of(f"r{handle}", 15), KvSource.LOCAL))
    assert all(isinstance(e.event, LocalPrefill) for e in decoder.step().events[:2])
    decoder.submit(Open(0, 3, SequenceSpec("c", (9,), Sampling()), KvSource.LOCAL))
    answers = [e.event for e in decoder.step().events if e.handle == 3]
    assert isinstance(answers[0], Deferred)
    decoder.submit(StreamCommand(0, 1, Abort()))
    decoder.submit(Open(0, 4, SequenceSpec("d", (9,), Sampling()), KvSource.LOCAL))
    answers = [e.event for e in decoder.step().events if e.handle == 4]
    assert isinstance(answers[0], LocalPrefill)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (
            replace(spec_of("wide", 3), num_choices=5),
            "sampling: 5 choices or beams are more than this worker runs at once; ask for at most "
            "4",
        ),
        (
            SequenceSpec("beams", (1, 2, 3), Sampling(max_tokens=50, beam=BeamParams(width=4))),
            "lower max_tokens or the width",
        ),
    ],
    ids=["choices", "beams"],
)
def test_what_could_never_run_here_is_refused_and_not_put_off(
    spec: SequenceSpec, told: str
) -> None:
    decoder = worker(num_blocks=40, max_num_seqs=4)
    decoder.submit(Open(0, 1, spec, KvSource.LOCAL))
    (answer,) = [e.event for e in decoder.step().events]
    assert isinstance(answer, Failed)
    assert answer.reason == "INVALID_REQUEST"
    assert not answer.is_retriable
    assert told in answer.message


def test_nobody_comes_in_before_those_that_were_swapped_out() -> None:
    seconds = itertools.count()  # each look at the clock is one later: computing anew is dear
    shape = SimShape(num_blocks=12, swap_bytes=50_000)
    decoder = SimDecode(LoopbackHub(), lambda: float(next(seconds)), shape)
    for handle in (1, 2):
        spec = SequenceSpec(f"r{handle}", (handle,) * 15, Sampling(max_tokens=50))
        decoder.submit(Open(0, handle, spec, KvSource.LOCAL))
    while decoder.swap.is_empty:
        assert not decoder.step().is_idle
    while decoder.swap_runner.run():
        decoder.step()
    small = SequenceSpec("c", (9,), Sampling())
    decoder.submit(Open(0, 3, small, KvSource.LOCAL))
    (answer,) = [e.event for e in decoder.step().events if e.handle == 3]
    assert isinstance(answer, Deferred)
    assert "swapped out" in answer.reason
    decoder.submit(StreamCommand(0, 2, Abort()))
    decoder.submit(Open(0, 4, small, KvSource.LOCAL))
    answers = [e.event for e in decoder.step().events if e.handle == 4]
    assert isinstance(answers[0], LocalPrefill)


def test_others_run_while_a_thread_copies_what_is_swapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = itertools.count()
    shape = SimShape(num_blocks=13, swap_bytes=50_000, max_num_launches=1)
    decoder = SimDecode(LoopbackHub(), lambda: float(next(seconds)), shape)
    monkeypatch.setattr(decoder, "copies_now", lambda: False)
    copied: list[str] = []
    for name in ("pack", "unpack"):
        move = getattr(decoder.engine.kv, name)

        def spy(*place: object, move: Callable[..., None] = move, name: str = name) -> None:
            copied.append(name)
            move(*place)

        monkeypatch.setattr(decoder.engine.kv, name, spy)
    specs = {
        handle: SequenceSpec(f"r{handle}", (handle,) * num, Sampling(max_tokens=25))
        for handle, num in ((1, 4), (2, 15), (3, 15))
    }
    for handle, spec in specs.items():
        decoder.submit(Open(0, handle, spec, KvSource.LOCAL))
    tokens: dict[int, list[int]] = {handle: [] for handle in specs}

    def step() -> None:
        for event in decoder.step().events:
            if isinstance(event.event, Tokens):
                tokens[event.handle] += [s.token_id for s in event.event.samples]
        decoder.pool.check_integrity()

    for _ in range(8):
        step()
    assert not decoder.swap.is_empty
    num_before, num_swapped = len(tokens[1]), len(tokens[3])
    step()
    assert len(tokens[1]) > num_before
    assert decoder.swap.num_swaps == 1, "its blocks are on their way"
    assert not copied
    for _ in range(200):
        while decoder.swap_runner.run():
            assert copied
        copied.clear()
        step()
        assert not copied
    for handle, spec in specs.items():
        expected = oracle_tokens(spec.prompt_token_ids, spec.sampling, 1000)
        # The second is preempted in its turn, to be placed anew: its copy is estimated too dear.
        num = len(tokens[2]) if handle == 2 else len(expected)
        assert tokens[handle] == expected[:num]
    assert len(tokens[3]) > num_swapped
    assert decoder.pool.counts().leased == 0


def test_beats_before_a_step_and_within_tell_how_many_tokens_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beats: list[int] = []
    before: list[list[int]] = []
    shape = SimShape(max_num_launches=1)
    decoder = SimDecode(LoopbackHub(), lambda: 0.0, shape, beat=beats.append)
    forward = decoder.engine.forward

    def watched(
        batch: Batch, layers_done: LayersDone | None = None
    ) -> tuple[tuple[Sample, ...], ...]:
        before.append(list(beats))
        return forward(batch, layers_done)

    monkeypatch.setattr(decoder.engine, "forward", watched)
    for handle, num_tokens in ((1, 9), (2, 7)):
        decoder.submit(Open(0, handle, spec_of(f"r{handle}", num_tokens), KvSource.LOCAL))
    for num_tokens in (9 + 7, 2):
        beats.clear()
        decoder.step()
        assert before.pop() == [num_tokens]
        assert len(beats) > 1
        assert set(beats) == {num_tokens}


def test_a_prompt_is_computed_in_parts_so_small_that_answers_beside_it_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of decoding takes 40 ms, each token of a prompt adds 1: the worker learns both, and
    doubles no step."""
    now_s = 0.0
    steps: list[tuple[int, float]] = []
    shape = SimShape(num_blocks=400, max_num_batched_tokens=256, max_num_launches=1)
    decoder = SimDecode(LoopbackHub(), lambda: now_s, shape)
    forward = decoder.engine.forward

    def slow(batch: Batch, layers_done: LayersDone | None = None) -> tuple[tuple[Sample, ...], ...]:
        nonlocal now_s
        num_prefilled = sum(len(part.token_ids) for part in batch.slices if len(part.token_ids) > 1)
        seconds = 0.04 + 1e-3 * num_prefilled
        steps.append((num_prefilled, seconds))
        now_s += seconds
        return forward(batch, layers_done)

    monkeypatch.setattr(decoder.engine, "forward", slow)
    for handle, num_tokens in ((1, 20), (2, 60)):
        decoder.submit(Open(0, handle, spec_of(f"r{handle}", num_tokens), KvSource.LOCAL))
    for handle in (3, 4):  # by the second it knows
        steps.clear()
        prompt = SequenceSpec(f"r{handle}", (handle,) * 400, Sampling(max_tokens=50))
        decoder.submit(Open(0, handle, prompt, KvSource.LOCAL))
        while not steps or steps[-1][0]:
            decoder.step()
    assert sum(num_prefilled for num_prefilled, _ in steps) == 400
    assert max(seconds for _, seconds in steps) < 2.1 * 0.04
