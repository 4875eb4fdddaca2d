"""What the validator's rules are made of: what is known of the model and its workers, limits, and
how a wrong value is reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from google.protobuf.message import Message

from baton.errors import FieldViolation
from baton.sampling_params import Limits, Range, Texts, TokenBiases, TokenIds

#: Violations of one repeated field that are reported one by one.
MAX_SHOWN = 4

_MAX_SHOWN_CHARS = 40

Violations = Iterator[FieldViolation]
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What requests are checked against.

    max_kv_tokens: tokens that the largest decode worker's memory holds. max_num_seqs: sequences
    that the widest one runs at once. max_token_chars: of the longest token of the tokenizer.
    has_tools: whether the chat template describes tools. aliases: further names. adapters: names of
    the LoRA adapters that all workers have.
    sampling_defaults: the model's own, by option.
    """

    name: str
    vocab_size: int
    max_model_len: int
    max_kv_tokens: int
    eos_token_ids: frozenset[int]
    has_chat_template: bool
    max_num_seqs: int
    max_token_chars: int
    has_tools: bool = False
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """What requests call the model itself."""
        return (self.name, *self.aliases)

    @property
    def max_prompt_tokens(self) -> int:
        """One token of output must fit, too."""
        return min(self.max_model_len, self.max_kv_tokens) - 1


def limit_violations(field: str, value: Any, limits: Limits, vocab_size: int) -> Violations:
    """What is wrong with the given value of the option at `field`."""
    match limits:
        case Range():
            if not limits.holds(value):
                yield FieldViolation(field, f"{value:g}: must be {limits}")
        case Texts():
            yield from text_violations(field, value, limits)
        case TokenIds():
            if len(value) > limits.max_num:
                # However many there are, they cost no more than this.
                yield FieldViolation(field, f"{len(value)} ids: give at most {limits.max_num}")
                return
            yield from id_violations(field, value, vocab_size)
        case TokenBiases():
            if len(value) > limits.max_num:
                yield FieldViolation(field, f"{len(value)} entries: give at most {limits.max_num}")
                return
            yield from id_violations(field, sorted(value), vocab_size, is_map=True)
            wrong = [(k, bias) for k, bias in value.items() if not limits.bias.holds(bias)]
            for token_id, bias in sorted(wrong)[:MAX_SHOWN]:
                yield FieldViolation(f"{field}[{token_id}]", f"{bias:g}: must be {limits.bias}")


def id_violations(
    field: str,
    token_ids: Sequence[int],
    vocab_size: int,
    *,
    is_map: bool = False,
    first: int = 0,
) -> Violations:
    """Token ids outside the vocabulary. is_map: they are the keys of a map. first: the index of the
    first of them in their field."""
    if not token_ids or max(token_ids) < vocab_size:
        return
    wrong = ((i, t) for i, t in enumerate(token_ids, first) if t >= vocab_size)
    for index, token_id in islice(wrong, MAX_SHOWN):
        yield FieldViolation(
            f"{field}[{token_id if is_map else index}]",
            f"token id {token_id}: must be below the vocabulary's size, {vocab_size}",
        )


def text_violations(field: str, texts: Sequence[str], limits: Texts) -> Violations:
    """More texts than there may be, or texts that are empty or too long."""
    max_chars = limits.max_chars
    if len(texts) > limits.max_num:
        yield FieldViolation(field, f"{len(texts)} {limits.unit}: give at most {limits.max_num}")
        return
    wrong = [(i, text) for i, text in enumerate(texts) if not 1 <= len(text) <= max_chars]
    for index, text in wrong[:MAX_SHOWN]:
        yield FieldViolation(
            f"{field}[{index}]", f"{len(text)} characters: must have 1 to {max_chars}"
        )


def given(message: Message, field: str, default: ValueT) -> ValueT:
    """An optional field's value, or its default."""
    value: ValueT = getattr(message, field)
    return value if message.HasField(field) else default


def shown(text: str) -> str:
    """A text of the client's in a message: quoted, and not long."""
    return repr(text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}...")
