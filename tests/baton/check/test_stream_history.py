"""What a client may see of a stream, and each way in which it may be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.check.faults import KnownRequest
from baton.check.stream_history import StreamHistory
from baton.client import Chunk, SamplingParams
from baton.client.results import Usage
from baton.types import FinishReason

RIGHT = ((1, 2, 3), (1, 5, 6))
REQUEST = KnownRequest((7, 8), SamplingParams(n=2, max_tokens=3), RIGHT)
LENGTH = FinishReason.LENGTH
PIECES = (
    Chunk(0, (1,), choice=0),
    Chunk(0, (1, 5), choice=1),
    Chunk(1, (2, 3), choice=0, finish_reason=LENGTH),
    Chunk(2, (6,), choice=1, finish_reason=LENGTH, usage=Usage(2, 6)),
)


def history_of(*pieces: Chunk) -> StreamHistory:
    history = StreamHistory(REQUEST)
    for piece in pieces:
        history.take(piece)
    return history


def test_a_right_stream_is_right_whole_and_cut_anywhere() -> None:
    assert not history_of(*PIECES).verdict(RIGHT, is_whole=True)
    for end in range(len(PIECES)):
        assert not history_of(*PIECES[:end]).verdict(RIGHT, is_whole=False)


Damage = Callable[[list[Chunk]], None]


def lose(pieces: list[Chunk]) -> None:
    del pieces[0]


def double(pieces: list[Chunk]) -> None:
    pieces.insert(1, pieces[0])


def go_on_after_the_end(pieces: list[Chunk]) -> None:
    pieces.append(Chunk(3, (9,), choice=0))


def end_no_choice(pieces: list[Chunk]) -> None:
    pieces[2] = replace(pieces[2], finish_reason=None)


def say_no_usage(pieces: list[Chunk]) -> None:
    pieces[3] = replace(pieces[3], usage=None)


def charge_more(pieces: list[Chunk]) -> None:
    pieces[3] = replace(pieces[3], usage=Usage(2, 7))


def charge_another_prompt(pieces: list[Chunk]) -> None:
    pieces[3] = replace(pieces[3], usage=Usage(3, 6))


@pytest.mark.parametrize(
    "damage",
    [
        lose,
        double,
        go_on_after_the_end,
        end_no_choice,
        say_no_usage,
        charge_more,
        charge_another_prompt,
    ],
)
def test_disorder_is_found(damage: Damage) -> None:
    pieces = list(PIECES)
    damage(pieces)
    assert history_of(*pieces).disorder(is_whole=True)


def test_another_token_is_a_difference_and_no_disorder() -> None:
    history = history_of(replace(PIECES[0], token_ids=(4,)), *PIECES[1:])
    assert "choice 0" in history.difference(RIGHT, is_whole=True)
    assert not history.disorder(is_whole=True)


def test_too_few_tokens_are_a_difference_of_a_whole_stream_alone() -> None:
    history = history_of(*PIECES[:2])
    assert history.difference(RIGHT, is_whole=True)
    assert not history.difference(RIGHT, is_whole=False)
