"""The GPU benchmark's check of launches ahead notices tokens that differ, and launches that wait
for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from baton.types import Sample, Sampling
from bench.gpu import ahead_speed
from bench.gpu.setting import Setting
from engine.interface import Batch

SETTING = Setting(torch.device("cpu"), torch.float16, 1)
MODEL = SimpleNamespace(kv=SimpleNamespace(tensor=torch.zeros(2)))
SEQUENCES = ahead_speed._Sequences([Sampling()] * 3, 5, 6, 50)


class Drawing:
    """An engine that derives each token from the token and the place before. It may ignore what was
    drawn, or wait."""

    def __init__(self, *, takes_drawn: bool = True) -> None:
        self.takes_drawn = takes_drawn
        self.may_wait = True
        self.waits = False
        self._drawn: list[int] = []

    def launch(self, batch: Batch) -> SimpleNamespace:
        if self.waits and not self.may_wait:
            raise RuntimeError("called a synchronizing CUDA operation")
        given = [
            part.token_ids[0]
            if part.follows is None or not self.takes_drawn
            else self._drawn[part.follows]
            for part in batch.slices
        ]
        self._drawn = [
            (3 * token + part.start) % 50 for token, part in zip(given, batch.slices, strict=True)
        ]
        samples = tuple((Sample(token, None),) for token in self._drawn)
        return SimpleNamespace(samples=lambda: samples)


def verdict(ahead: Drawing) -> str:
    return ahead_speed._verdict([Drawing(), ahead], MODEL, SEQUENCES, SETTING)


def test_the_same_tokens_without_a_wait_are_right() -> None:
    assert verdict(Drawing()) == "right"


def test_other_tokens_are_told() -> None:
    assert verdict(Drawing(takes_drawn=False)) == "other tokens"


def test_a_wait_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Drawing()
    engine.waits = True

    @contextmanager
    def no_waits(_setting: Setting) -> Iterator[None]:
        engine.may_wait = False
        yield

    monkeypatch.setattr(ahead_speed, "_no_waits", no_waits)
    told = verdict(engine)
    assert told.startswith("waits at ")
    assert "test_gpu_ahead.py:" in told


def test_another_error_is_not_taken_for_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_batch: Batch) -> None:
        raise RuntimeError("out of memory")

    engine = Drawing()
    monkeypatch.setattr(engine, "launch", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        ahead_speed._launch_without_wait(engine, SETTING, Batch(()))


def test_steps_follow_only_what_is_still_being_drawn() -> None:
    tokens = [[1, 2], [1, 2], [1, 2]]
    waiting, following = SEQUENCES.batch(1, tokens), SEQUENCES.batch(2, tokens)
    assert [part.follows for part in waiting.slices] == [None] * 3
    assert [part.follows for part in following.slices] == [0, 1, 2]
    assert [part.start for part in following.slices] == [7] * 3
    assert [part.rows[0].num_output_tokens for part in following.slices] == [2] * 3
    blocks = [block for part in following.slices for block in part.block_table]
    assert len(set(blocks)) == len(blocks)
