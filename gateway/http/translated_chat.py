"""A chat in the form of another API: converts its request to a chat's, and the chat's output to
that API's, piece by piece."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

from baton.v1 import inference_pb2
from gateway.chat.choice import ChatChoice
from gateway.chat.style import ChatStyle
from gateway.http.chat import ChatBody, ChatFormat
from gateway.http.errors import FieldNames, Fills, in_words_of, invalid, names_in
from gateway.http.format import Answer, Chunk, Dialect, by_choice
from gateway.http.logprobs import BytesOf
from gateway.http.requests import ChoiceSoFar, ModelBody, validated

#: Last event of a piece, with its tokens and number of raw characters. A resumed stream sends again
#: what followed the client's last one.
PROGRESS = "baton.progress"


#: Paths in a chat body that other APIs name differently: a tool's schema, and fields that they
#: merge.
OF_PARAMETERS = ("function.parameters", "parameters")
OF_NAME = Fills("tool_choice.function.name", ".name")
OF_FORMAT = (
    Fills("response_format", ".format"),
    Fills("response_format.json_schema.schema", ".format.schema"),
)


class ChatOutput(ABC):
    """Output of a chat in another API's form, with its unsent events."""

    def __init__(self) -> None:
        self._events: list[str] = []

    @abstractmethod
    def add(self, delta: Mapping[str, Any]) -> None:
        """Add a chat delta."""

    @abstractmethod
    def close(self) -> None:
        """Close the open part."""

    def add_logprobs(self, entries: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027, not every API has them
        """Add the log probabilities of the next text."""

    def resume(self, so_far: ChoiceSoFar) -> None:  # noqa: ARG002, not every API numbers its events
        """Discard the events so far, which an earlier stream sent."""
        self._events.clear()

    def emit(self, kind: str, **fields: Any) -> None:
        """Queue a server-sent event."""
        self._events.append(f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n")

    def take_events(self) -> str:
        """Remove and return the queued events."""
        text = "".join(self._events)
        self._events.clear()
        return text


class TranslatedChat(ABC):
    """A chat in the form of another API (format.Format). Subclasses add the begin and end of a
    stream, and the document."""

    id_prefix: str
    dialect: Dialect
    has_event_ids = False

    def __init__(
        self,
        asked: ModelBody,
        fields: Mapping[str, Any],
        paths: Sequence[str],
        bytes_of: BytesOf,
        style: ChatStyle,
    ) -> None:
        """asked: the other API's body. fields: of the chat body. paths: field path of each message.
        Raises InvalidRequest with that API's field names."""
        moved = {f"messages[{index}]": path for index, path in enumerate(paths)}
        self._name_of = names_in(asked, moved)
        with in_words_of(self._name_of):
            self._chat = ChatFormat(validated(ChatBody, fields), bytes_of, style)
            self._chat.replay()
        self._bytes_of = bytes_of
        self.answer: Answer | None = None
        self._choice: ChatChoice | None = None
        for index, entry in enumerate(self.body.resume_from or ()):
            if entry.has_ended:
                fault = "true: an answer that has ended has nothing to come; leave it out"
                raise invalid(f"resume_from[{index}].has_ended", fault)
        self.last: Chunk | None = None
        """The piece that ended the output."""
        self.prompt_token_ids: Sequence[int] = ()

    @property
    def body(self) -> ChatBody:
        return self._chat.body

    @property
    def requests(self) -> Sequence[inference_pb2.GenerateRequest]:
        return self._chat.requests

    @property
    def field_names(self) -> FieldNames:
        of_chat = self._chat.field_names
        return lambda field: self._name_of(of_chat(field))

    @property
    def warning(self) -> str:
        return self._chat.warning

    def ids(self, prefix: str) -> Callable[[], str]:
        """Generator of ids for the output's parts; see ChatFormat.ids."""
        return self._chat.ids(0, prefix)

    @property
    @abstractmethod
    def output(self) -> ChatOutput:
        """The output, from which events and the document are made."""

    def begin(self, prompt: int, answer: Answer, prompt_token_ids: Sequence[int]) -> None:
        self.answer = answer
        self.prompt_token_ids = prompt_token_ids
        self._chat.begin(prompt, answer, prompt_token_ids)

    def usage(self, usage: Mapping[str, Any]) -> Mapping[str, Any]:
        """See ChatFormat.usage."""
        return self._chat.usage(usage)

    @abstractmethod
    def begin_stream(self) -> None:
        """Emit the first events of a stream."""

    def event(self, prompt: int, chunk: Chunk, usage: str, earlier: str) -> str:  # noqa: ARG002
        replayed, text = self._chat.split_replay(0, chunk.text)
        if self._choice is None:
            self._choice = self._chat.new_choice(0)
            self.begin_stream()
            for entry in self.body.resume_from or ():
                self._add(self._choice, replayed)
                self.output.resume(entry)
        self._add(self._choice, text, chunk)
        if self.body.return_token_ids and not chunk.finish_reason:
            self.output.emit(PROGRESS, token_ids=list(chunk.token_ids), num_chars=len(text))
        return self.output.take_events()

    @abstractmethod
    def end(self, usage: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
        """See format.Format."""

    def document(self, chunks: Sequence[Sequence[Chunk]], usage: Mapping[str, Any]) -> Any:
        (pieces,) = by_choice(chunks[0]).values()
        choice = self._chat.new_choice(0)
        if self.body.logprobs:  # of the part that a piece's text belongs to
            for piece in pieces:
                self._add(choice, piece.text, piece)
        else:
            self._count(choice, *pieces[:-1])
            self._add(choice, "".join(piece.text for piece in pieces), pieces[-1])
        return self.whole(self.usage(usage))

    @abstractmethod
    def whole(self, usage: Mapping[str, Any]) -> Any:
        """The document of a complete output."""

    def _add(self, choice: ChatChoice, text: str, chunk: Chunk | None = None) -> None:
        """Add text. chunk: None for text that an earlier stream sent."""
        is_last = chunk is not None and bool(chunk.finish_reason)
        if chunk is not None:
            self._count(choice, chunk)
        for delta in choice.deltas(text, is_last=is_last):
            self.output.add(delta)
        if is_last:
            self.last = chunk
            self.output.close()

    def _count(self, choice: ChatChoice, *chunks: Chunk) -> None:
        """Count the tokens of pieces, and add the log probabilities of their answer."""
        for chunk in chunks:
            of_answer = choice.count(map(self._bytes_of, chunk.token_ids))
            found = self._chat.logprobs([*compress(chunk.logprobs, of_answer)])
            if found is not None:
                self.output.add_logprobs(found["content"])


def response_format(asked: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """response_format of the chat. asked: has the schema at its top."""
    if asked is None or asked.get("type") != "json_schema":
        return asked
    return {"type": "json_schema", "json_schema": {"schema": asked.get("schema")}}
