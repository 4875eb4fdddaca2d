"""A stream resumes after the event id that the client names: earlier events are left out, however
either answer was cut into pieces, and a different answer is not joined to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.v1 import inference_pb2
from gateway.http.generation import EventIds

Chunk = inference_pb2.GenerateResponse

#: Each token's text; some have none, as the beginnings of a character.
ANSWERS = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.text(max_size=3)), min_size=1)
CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def chunks_of(
    answer: Sequence[tuple[int, str]], cuts: Sequence[int], choice: int = 0, tail: str = ""
) -> Iterator[Chunk]:
    """tail: text that waits for the end."""
    start, number = 0, 0
    while start < len(answer):
        part = answer[start : start + cuts[number % len(cuts)]]
        start, number = start + len(part), number + 1
        chunk = Chunk(
            choice=choice,
            token_ids=[token for token, _ in part],
            text="".join(text for _, text in part),
        )
        for token, _ in part:
            chunk.logprobs.add().chosen.token_id = token
        if start == len(answer):
            chunk.text, chunk.finish_reason = chunk.text + tail, 1  # stop
        yield chunk


def added(chunks: Sequence[Chunk]) -> tuple[list[int], list[int], str, list[int]]:
    """All that came of one choice: tokens, those with log probabilities, text, ends."""
    return (
        [token for chunk in chunks for token in chunk.token_ids],
        [each.chosen.token_id for chunk in chunks for each in chunk.logprobs],
        "".join(chunk.text for chunk in chunks),
        [chunk.finish_reason for chunk in chunks if chunk.finish_reason],
    )


def taken_up(
    answers: Sequence[Sequence[tuple[int, str]]], cuts: Sequence[int], num_events: int, tail: str
) -> tuple[EventIds, list[Chunk]]:
    """Ids of what comes behind the first events of a stream, and those events."""
    ids, kept = EventIds(7), []
    events = zip_longest(*(chunks_of(a, cuts, i, tail) for i, a in enumerate(answers)))
    for chunk in [c for several in events for c in several if c is not None][:num_events]:
        earlier, new = ids.split(chunk.choice, chunk)
        assert earlier is None
        assert new is not None
        kept.append(new)
    return EventIds.behind(str(ids)), kept


@given(
    answers=st.lists(ANSWERS, min_size=1, max_size=3),
    cuts=CUTS,
    other_cuts=CUTS,
    num_events=st.integers(0, 20),
    tail=st.text(max_size=2),
)
def test_what_was_sent_and_what_comes_then_are_one_stream(
    answers: list[list[tuple[int, str]]],
    cuts: list[int],
    other_cuts: list[int],
    num_events: int,
    tail: str,
) -> None:
    ids, got = taken_up(answers, cuts, num_events, tail)
    assert ids.seed == 7
    left_out: list[Chunk] = []
    for index, answer in enumerate(answers):
        for chunk in chunks_of(answer, other_cuts, index, tail):
            earlier, new = ids.split(index, chunk)
            left_out += [earlier] if earlier is not None else []
            got += [new] if new is not None else []
    ids.check_end()
    for index, answer in enumerate(answers):
        whole = added(list(chunks_of(answer, [len(answer)], index, tail)))
        assert added([chunk for chunk in got if chunk.choice == index]) == whole
    assert added(left_out) == added(taken_up(answers, cuts, num_events, tail)[1]) or answers[1:]


@given(answer=ANSWERS, cuts=CUTS, num_events=st.integers(1, 20), tail=st.text(max_size=2))
def test_an_id_names_one_place(
    answer: list[tuple[int, str]], cuts: list[int], num_events: int, tail: str
) -> None:
    """While the client's part is drawn again, too: a stream may break off there."""
    ids, kept = taken_up([answer], cuts, num_events, tail)
    name = str(ids)
    for chunk in chunks_of(answer, [1], 0, tail):
        if len(added(kept)[0]) == len(answer):
            break
        _, new = ids.split(0, chunk)
        if new is not None:
            break
        assert str(ids) == name


@given(answer=ANSWERS, cuts=CUTS, other_cuts=CUTS, num_events=st.integers(1, 20), data=st.data())
def test_another_answer_is_no_part_of_it(
    answer: list[tuple[int, str]],
    cuts: list[int],
    other_cuts: list[int],
    num_events: int,
    data: st.DataObject,
) -> None:
    """Another token, or an earlier end, within what the client has."""
    ids, kept = taken_up([answer], cuts, num_events, "")
    num_kept = len(added(kept)[0])
    at = data.draw(st.integers(0, num_kept - 1), label="where they part")
    other = [*answer]
    if data.draw(st.booleans(), label="is shorter") and at:
        del other[at:]
    else:
        other[at] = (other[at][0] ^ 1, other[at][1])

    def draw_again() -> None:
        for chunk in chunks_of(other, other_cuts):
            _, new = ids.split(0, chunk)
            assert new is None
        ids.check_end()

    with pytest.raises(InvalidRequest) as caught:
        draw_again()
    assert [v.field for v in caught.value.violations] == ["Last-Event-ID"]


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "12345678901234567",
        "7;",
        "7;0.1",
        "7;0.1.1.1;",
        "7;0.1.1.1x",
        "-7",
        "7;0.123456789.1.1",
    ],
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        EventIds.behind(text)
    assert [v.field for v in caught.value.violations] == ["Last-Event-ID"]
    assert "as it came" in caught.value.message
