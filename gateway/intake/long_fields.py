"""What requests may have much of, read out of their messages once: each time makes a copy, and
that of 16 MB of text takes tens of milliseconds, as does a look at each of a million token ids.
Others run between the pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import FieldViolation
from baton.v1 import inference_pb2
from gateway.intake.violations import MAX_SHOWN, id_violations
from gateway.long_work import Pacer, in_pieces, let_others_run

#: Of a conversation.
MAX_MESSAGES = 1024


@dataclass(frozen=True, slots=True)
class ReadIds:
    """Those of one field; none if there are more than there may be, which are refused by their
    number. wrong: the first ones beyond the vocabulary."""

    token_ids: tuple[int, ...] = ()
    wrong: tuple[FieldViolation, ...] = ()


@dataclass(frozen=True, slots=True)
class LongFields:
    """Of a request. prompt: its token ids. text: of a prompt of that kind. contents: of a chat's
    messages. so_far: of each entry of resume_from."""

    prompt: ReadIds = ReadIds()
    text: str = ""
    contents: tuple[str, ...] = ()
    so_far: tuple[ReadIds, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Of all fields together."""
        return sum(len(each.token_ids) for each in (self.prompt, *self.so_far))


async def read_ids(field: str, token_ids: Sequence[int], most: int, vocab_size: int) -> ReadIds:
    """most: as many as there may be."""
    if len(token_ids) > most:
        return ReadIds()
    made: list[int] = []
    wrong: list[FieldViolation] = []

    def read(piece: Sequence[int]) -> None:
        if len(wrong) < MAX_SHOWN:
            wrong.extend(id_violations(field, piece, vocab_size, first=len(made)))
        made.extend(piece)

    await in_pieces(token_ids, read)
    return ReadIds(tuple(made), tuple(wrong[:MAX_SHOWN]))


async def read_prompt(prompt: inference_pb2.Prompt, most: int, vocab_size: int) -> LongFields:
    """most: token ids, as many as there may be."""
    match prompt.WhichOneof("kind"):
        case "token_ids":
            ids = prompt.token_ids.ids
            return LongFields(await read_ids("prompt.token_ids.ids", ids, most, vocab_size))
        case "text":
            text = prompt.text
            await let_others_run(len(text))
            return LongFields(text=text)
        case "chat":
            pacer = Pacer()
            contents: list[str] = []
            for message in prompt.chat.messages[:MAX_MESSAGES]:
                contents.append(message.content)
                await pacer.advance(len(contents[-1]))
            return LongFields(contents=tuple(contents))
    return LongFields()


async def read_several(
    fields: Sequence[tuple[str, Sequence[int]]], most: int, vocab_size: int
) -> tuple[ReadIds, ...]:
    """As read_ids, of each field."""
    pacer = Pacer()
    read: list[ReadIds] = []
    for field, token_ids in fields:
        read.append(await read_ids(field, token_ids, most, vocab_size))
        await pacer.advance(len(token_ids))
    return tuple(read)
