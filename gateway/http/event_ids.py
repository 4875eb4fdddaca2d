"""Ids of a stream's events, and how a stream goes on behind one: a client of server-sent events
sends the id of the last event that it got as `Last-Event-ID` (WHATWG HTML, "Server-sent events"),
with the same request. Pure.

An id says how far each choice came, and not by which tokens: a gateway holds nothing of streams
that broke off. The answer is drawn again with the seed of the id, and what the client has is left
out. A checksum of its tokens is in the id, so that no stream is ever put together of two answers.

    SEED[;CHOICE.TOKENS.CHARACTERS.CHECKSUM[!]]...      !: the choice has ended; hexadecimal numbers
"""

from __future__ import annotations

import re
import zlib
from array import array
from dataclasses import dataclass

from baton.errors import FieldViolation, InvalidRequest
from baton.sampling_params import MAX_CHOICES
from baton.v1 import inference_pb2, sampling_pb2
from gateway.http.errors import shown_value
from gateway.http.json_body import MAX_PROMPTS

LAST_EVENT_ID = "Last-Event-ID"

Chunk = inference_pb2.GenerateResponse

_SEED = re.compile(r"[0-9a-f]{1,16}")
_PLACE = re.compile(r"([0-9a-f]{1,8})\.([0-9a-f]{1,8})\.([0-9a-f]{1,8})\.([0-9a-f]{1,8})(!?)")

_OTHER_ANSWER = (
    "its answer cannot be drawn again: the request is another one, or workers round otherwise now; "
    "begin anew, without it"
)


@dataclass(slots=True)
class _Place:
    """How far one choice has come. checksum: CRC-32 of its tokens, 4 bytes each."""

    num_tokens: int = 0
    num_chars: int = 0
    checksum: int = 0
    has_ended: bool = False

    def add(self, chunk: Chunk) -> None:
        self.num_tokens += len(chunk.token_ids)
        self.num_chars += len(chunk.text)
        self.checksum = zlib.crc32(array("I", chunk.token_ids).tobytes(), self.checksum)
        self.has_ended = bool(chunk.finish_reason)


class EventIds:
    """Of one stream. str() is the id of an event that is sent now."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._places: dict[int, _Place] = {}
        self._to_leave_out: dict[int, _Place] = {}
        """How far the client has choices that have not come as far again."""

    @classmethod
    def behind(cls, last: str) -> EventIds:
        """Of what follows the event with that id. Raises InvalidRequest if it is none."""
        seed, *places = last.split(";", MAX_CHOICES * MAX_PROMPTS)
        found = [_PLACE.fullmatch(place) for place in places]
        if not _SEED.fullmatch(seed) or not all(found):
            fault = f"{shown_value(last)}: no id that events here have; give it as it came"
            raise InvalidRequest.of(FieldViolation(LAST_EVENT_ID, fault))
        ids = cls(int(seed, 16))
        for place in filter(None, found):
            choice, num_tokens, num_chars, checksum = (int(n, 16) for n in place.groups()[:4])
            ids._to_leave_out[choice] = _Place(num_tokens, num_chars, checksum, bool(place[5]))
        return ids

    def __str__(self) -> str:
        places = (
            f";{choice:x}.{at.num_tokens:x}.{at.num_chars:x}.{at.checksum:x}{'!' * at.has_ended}"
            for choice, at in sorted({**self._places, **self._to_leave_out}.items())
        )
        return f"{self.seed:x}{''.join(places)}"

    def split(self, choice: int, chunk: Chunk) -> tuple[Chunk | None, Chunk | None]:
        """The next piece of a choice: what the client has of it, and what is new. Raises
        InvalidRequest if the client has another answer."""
        at, last = self._places.setdefault(choice, _Place()), self._to_leave_out.get(choice)
        if last is None:
            at.add(chunk)
            return None, chunk
        num_tokens = min(len(chunk.token_ids), last.num_tokens - at.num_tokens)
        num_chars = min(len(chunk.text), last.num_chars - at.num_chars)
        is_whole = (num_tokens, num_chars) == (len(chunk.token_ids), len(chunk.text))
        earlier: Chunk = chunk
        new: Chunk | None = None
        if not is_whole or (chunk.finish_reason and not last.has_ended):
            earlier, new = _cut(chunk, num_tokens, num_chars)
        at.add(earlier)
        if at == last:
            del self._to_leave_out[choice]
        elif new is not None or earlier.finish_reason:
            raise _other_answer()
        if new is not None:
            at.add(new)
        return earlier, new

    def check_end(self) -> None:
        """Raises InvalidRequest if the stream ends before it is where the client is."""
        if self._to_leave_out:
            raise _other_answer()


def _cut(chunk: Chunk, num_tokens: int, num_chars: int) -> tuple[Chunk, Chunk]:
    """In two. What comes once is in the first, if it is of an output's beginning, and in the second
    if it is of its end."""
    first, second = Chunk(), Chunk()
    first.CopyFrom(chunk)
    second.CopyFrom(chunk)
    del first.token_ids[num_tokens:], first.logprobs[num_tokens:]
    del second.token_ids[:num_tokens], second.logprobs[:num_tokens]
    first.text, second.text = chunk.text[:num_chars], chunk.text[num_chars:]
    first.finish_reason = sampling_pb2.FINISH_REASON_UNSPECIFIED
    first.ClearField("stop_cause")
    first.ClearField("score")
    first.ClearField("usage")
    first.ClearField("timing")
    second.ClearField("prompt_token_ids")
    second.ClearField("prompt_logprobs")
    return first, second


def _other_answer() -> InvalidRequest:
    return InvalidRequest.of(FieldViolation(LAST_EVENT_ID, _OTHER_ANSWER))
