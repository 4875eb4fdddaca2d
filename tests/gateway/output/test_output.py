"""Detokenizing, stop strings and the merging of tokens: the same whatever the cuts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import EngineFault
from baton.types import FinishReason, Sample
from gateway.intake.decoding import Decoding
from gateway.intake.request import TextOptions
from gateway.output.output import ChoiceOutput, Detokenizer, StopMatcher
from tests.support.fake_workers import text_of


def bytes_text(token_ids: Sequence[int]) -> str:
    """A byte per token, as a byte-level tokenizer has it; ids beyond are without text."""
    return bytes(t for t in token_ids if t < 256).decode("utf-8", errors="replace")


def strip_text(token_ids: Sequence[int]) -> str:
    """As a SentencePiece decoder: every word brings its space, and the text loses its first one."""
    return "".join(f" {chr(97 + t % 26)}" for t in token_ids).removeprefix(" ")


def cut(items: Sequence[int], borders: Sequence[int]) -> list[Sequence[int]]:
    """`items` in pieces; borders beyond the end are harmless."""
    edges = [0, *sorted(b % (len(items) + 1) for b in borders), len(items)]
    return [items[a:b] for a, b in pairwise(edges)]


IDS = st.lists(st.integers(0, 300), max_size=200) | st.text(max_size=60).map(
    lambda text: list(text.encode())
)
BORDERS = st.lists(st.integers(0, 1000), max_size=20)


@given(ids=IDS, borders=BORDERS)
def test_pieces_and_flush_are_the_whole_text_of_bytes(ids: list[int], borders: list[int]) -> None:
    detokenizer = Detokenizer(Decoding(bytes_text))
    text = "".join(detokenizer.feed(piece) for piece in cut(ids, borders)) + detokenizer.flush()
    assert text == bytes_text(ids)


@given(ids=st.lists(st.integers(0, 300), max_size=100), borders=BORDERS)
def test_pieces_and_flush_are_the_whole_text_of_words(ids: list[int], borders: list[int]) -> None:
    detokenizer = Detokenizer(Decoding(strip_text))
    text = "".join(detokenizer.feed(piece) for piece in cut(ids, borders)) + detokenizer.flush()
    assert text == strip_text(ids)


@given(text=st.text(max_size=40))
def test_only_unfinished_characters_wait(text: str) -> None:
    detokenizer = Detokenizer(Decoding(bytes_text))
    released = ""
    for number, byte in enumerate(text.encode(), start=1):
        released += detokenizer.feed([byte])
        whole = text.encode()[:number].decode(errors="ignore")
        assert released == whole.rstrip("\ufffd") or "\ufffd" in text


@pytest.mark.parametrize("token_id", [0x80, 0xE4, 256])
def test_an_endless_broken_character_takes_bounded_memory(token_id: int) -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return bytes_text(ids)

    detokenizer = Detokenizer(Decoding(decode))
    ids = [token_id] * 2000
    text = "".join(detokenizer.feed([i]) for i in ids) + detokenizer.flush()
    assert text == bytes_text(ids)
    assert longest < 200


def reference_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the match that ends first (then: begins first)."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


AB = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


@given(text=AB, stops=STOPS, borders=BORDERS, is_included=st.booleans())
def test_stop_strings_are_found_wherever_the_text_is_cut(
    text: str, stops: list[str], borders: list[int], is_included: bool
) -> None:
    matcher = StopMatcher(stops, is_stop_included=is_included)
    expected, expected_stop = reference_stop(text, stops)
    released, found = "", None
    for piece in cut(text, borders):  # type: ignore[arg-type]
        match = matcher.feed(piece)  # type: ignore[arg-type]
        released, found = released + match.text, match.stop
        assert text.startswith(released)
        if found:
            break
    released += matcher.flush()
    assert found == expected_stop
    assert released == expected + (found if found and is_included else "")


@given(text=AB, stops=STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops, is_stop_included=False)
    match = matcher.feed(text)
    if match.stop is None:
        held = text[len(match.text) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


TOKENS = st.lists(st.integers(1, 4), min_size=1, max_size=40)


@given(
    tokens=TOKENS,
    borders=BORDERS,
    stops=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), max_size=2),
    min_tokens=st.integers(0, 5),
    takes=st.lists(st.booleans(), min_size=45, max_size=45),
)
def test_an_output_does_not_depend_on_how_its_tokens_came(
    tokens: list[int],
    borders: list[int],
    stops: list[list[int]],
    min_tokens: int,
    takes: list[bool],
) -> None:
    def run(pieces: Sequence[Sequence[int]], take: Sequence[bool]) -> tuple[object, ...]:
        options = TextOptions(stop=tuple(text_of(stop) for stop in stops))
        output = ChoiceOutput(Decoding(text_of), options, min_tokens)
        sent: list[int] = []
        text, index, last = "", 0, None
        for number, piece in enumerate(pieces):
            is_end = number == len(pieces) - 1
            finish = FinishReason.LENGTH if is_end else FinishReason.NONE
            output.add(index, tuple(map(Sample, piece)), finish)
            index += len(piece)
            if is_end or output.finish or take[number]:
                last = output.take()
                if last:
                    assert last.token_index == len(sent)
                    sent += [sample.token_id for sample in last.samples]
                    text += last.text
            if output.finish:
                break
        assert last is not None
        assert sent == output.token_ids
        return sent, text, last.finish, last.stop

    one_by_one = run([[token] for token in tokens], [True] * 45)
    assert run(cut(tokens, borders), takes) == one_by_one


@given(tokens=TOKENS, again=st.integers(0, 50), num_more=st.integers(0, 5))
def test_tokens_that_come_again_change_nothing(
    tokens: list[int], again: int, num_more: int
) -> None:
    output = ChoiceOutput(Decoding(text_of), TextOptions(), 0)
    output.add(0, tuple(map(Sample, tokens)), FinishReason.NONE)
    start = again % len(tokens)
    more = [1] * num_more
    output.add(start, tuple(map(Sample, tokens[start:] + more)), FinishReason.NONE)
    assert output.token_ids == tokens + more


def test_gaps_and_changes_are_faults() -> None:
    output = ChoiceOutput(Decoding(text_of), TextOptions(), 0)
    output.add(0, (Sample(5), Sample(6)), FinishReason.NONE)
    with pytest.raises(EngineFault, match="never came"):
        output.add(3, (Sample(7),), FinishReason.NONE)
    with pytest.raises(EngineFault, match="came twice"):
        output.add(1, (Sample(7),), FinishReason.NONE)


def test_a_held_back_text_is_released_at_the_end() -> None:
    output = ChoiceOutput(Decoding(text_of), TextOptions(stop=(text_of([1, 2, 3]),)), 0)
    output.add(0, (Sample(9), Sample(1), Sample(2)), FinishReason.NONE)
    first = output.take()
    assert first is not None
    assert (first.text, len(first.samples)) == (text_of([9]), 3)
    output.add(3, (Sample(4),), FinishReason.LENGTH)
    last = output.take()
    assert last is not None
    assert last.text == text_of([1, 2, 4])
