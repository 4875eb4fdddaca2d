"""What the validator's rules are made of: ranges, and how a wrong value is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from baton.errors import FieldViolation

#: Violations of one repeated field that are told one by one.
MAX_TOLD = 4

_MAX_SHOWN_CHARS = 40

Violations = Iterator[FieldViolation]
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Range:
    """low <= value <= high, without low itself if `is_open`."""

    field: str
    low: float
    high: float
    is_open: bool = False

    def holds(self, value: float) -> bool:
        is_above = value > self.low if self.is_open else value >= self.low
        return is_above and value <= self.high  # both false for NaN

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.is_open else f"{self.low:g} or more"
        return f"{low}, and at most {self.high:g}"


def by_field(*ranges: Range) -> Mapping[str, Range]:
    return {limits.field: limits for limits in ranges}


def range_violations(message: Message, ranges: Mapping[str, Range], path: str) -> Violations:
    """Given fields of `message`, which stands at `path`, that are out of their range. Few are
    given: they are looked at."""
    for field, value in message.ListFields():
        limits = ranges.get(field.name)
        if limits is not None and not limits.holds(value):
            yield FieldViolation(f"{path}.{limits.field}", f"{value:g}: must be {limits}")


def id_violations(
    field: str, token_ids: Sequence[int], vocab_size: int, *, is_map: bool = False
) -> Violations:
    """Token ids outside the vocabulary. is_map: they are the keys of a map."""
    if not token_ids or max(token_ids) < vocab_size:
        return
    wrong = [(i, t) for i, t in enumerate(token_ids) if t >= vocab_size]
    for index, token_id in wrong[:MAX_TOLD]:
        yield FieldViolation(
            f"{field}[{token_id if is_map else index}]",
            f"token id {token_id}: must be below the vocabulary's size, {vocab_size}",
        )


def text_violations(
    field: str, texts: Sequence[str], max_num: int, max_chars: int, unit: str
) -> Violations:
    """More texts than `max_num`, and texts that are empty or longer than `max_chars`. unit: what
    the texts are."""
    if len(texts) > max_num:
        yield FieldViolation(field, f"{len(texts)} {unit}: give at most {max_num}")
    wrong = [(i, text) for i, text in enumerate(texts) if not 1 <= len(text) <= max_chars]
    for index, text in wrong[:MAX_TOLD]:
        yield FieldViolation(
            f"{field}[{index}]", f"{len(text)} characters: must have 1 to {max_chars}"
        )


def is_given(message: Message, field: str) -> bool:
    """Whether an optional field is set."""
    return message.HasField(field)


def given(message: Message, field: str, default: ValueT) -> ValueT:
    """An optional field's value, or its default."""
    value: ValueT = getattr(message, field)
    return value if is_given(message, field) else default


def shown(text: str) -> str:
    """A text of the client's in a message: quoted, and not long."""
    return repr(text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}...")
