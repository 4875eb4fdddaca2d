"""Interface between the HTTP port and the API formats, one file each. A format defines its paths,
body fields, answers, events and errors. Shared parts of answers are here, too."""

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from google.protobuf.json_format import MessageToDict

from baton.types import Sampling
from baton.v1 import inference_pb2
from gateway.chat.style import ChatStyle
from gateway.http.connection import JSON, HttpRequest, HttpResponse
from gateway.http.errors import FieldNames, HttpError
from gateway.http.json_body import read_fields
from gateway.http.logprobs import BytesOf
from gateway.http.requests import BodyT, GenerationBody, ModelBody, validated
from gateway.long_work import let_others_run
from gateway.serving import Models, Serving, unique_request_id

_MAX_WARNED = 8
_MAX_WARNED_CHARS = 64

_DONE = "data: [DONE]\n\n"

#: ASCII JSON, because some line readers split at Unicode line separators, too.
quoted = json.encoder.encode_basestring_ascii

Chunk = inference_pb2.GenerateResponse


@dataclass(frozen=True, slots=True)
class Dialect:
    """Error form, id headers and key header of an API, for all paths with `prefix`.

    id_headers: answer headers that carry the request id. shape: converts an error to the API's
    form. key_header: for API keys, besides authorization; empty for none. error_event: event line
    before an error within a stream.
    """

    prefix: str
    id_headers: tuple[str, ...]
    shape: Callable[[HttpError], HttpError]
    key_header: str = ""
    error_event: str = ""


#: The default, for paths without a prefix of another dialect.
OPENAI = Dialect("", ("x-request-id",), lambda error: error)


@dataclass(frozen=True, slots=True)
class Door:
    """Shared state of request handlers."""

    models: Models
    styles: Mapping[Serving, ChatStyle]

    async def parsed(self, cls: type[BodyT], request: HttpRequest, response: HttpResponse) -> BodyT:
        """Parse the body, and list its unknown fields in a warning header. Raises
        InvalidRequest, naming each wrong field."""
        return await self.parsed_as(lambda _: cls, cls.id_fields, request, response)

    async def parsed_as(
        self,
        class_of: Callable[[Mapping[str, Any]], type[BodyT]],
        id_fields: Sequence[str],
        request: HttpRequest,
        response: HttpResponse,
    ) -> BodyT:
        """As `parsed`. class_of: the body's class by its fields. id_fields: see Body."""
        await self.models.turns.take()
        max_model_len = max(serving.facts.max_model_len for serving in self.models)
        num_bytes = len(request.body)
        fields = await read_fields(request.body, id_fields, max_model_len)
        body = validated(class_of(fields), fields)
        request.body = b""
        await let_others_run(num_bytes)
        if body.unknown_fields:
            names = [name[:_MAX_WARNED_CHARS] for name in body.unknown_fields[:_MAX_WARNED]]
            warn(f"{', '.join(names)}: ignored, not known here", response)
        return body

    def form(self, make: MakeFormat, body: ModelBody) -> tuple[Serving, Format]:
        """The model that a body names, and its format. Raises BatonError."""
        serving = self.models.of(body.model or "")
        return serving, make(body, serving.tokenizer.bytes_of, self.styles[serving])


@dataclass(frozen=True, slots=True)
class Route:
    """One path and method: documentation and handler.

    method: in lower case. body: None without a request body. is_open: needs no key. make: creates
    the format of a generation, which may be streamed. handle: serves other routes; None if HttpApp
    serves it.
    """

    path: str
    method: str
    summary: str
    body: type[ModelBody] | None = None
    answer: str = JSON
    is_open: bool = False
    make: MakeFormat | None = None
    handle: Callable[[Door, HttpRequest, HttpResponse], Awaitable[None]] | None = None
    dialect: Dialect = OPENAI


@dataclass(frozen=True, slots=True)
class Answer:
    """Members shared by all chunks of an answer. sampling: as resolved."""

    id: str
    created: int
    model: str
    fingerprint: str
    sampling: Sampling

    def fields(self, kind: str) -> dict[str, Any]:
        """kind: OpenAI's `object`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class Format(Protocol):
    """One API's form of generation: requests for the tiers, and the form of the answer."""

    id_prefix: str
    dialect: Dialect
    has_event_ids: bool
    """Whether events can have ids."""

    @property
    def body(self) -> GenerationBody:
        """The body as sent."""

    @property
    def requests(self) -> Sequence[inference_pb2.GenerateRequest]:
        """One request per prompt."""

    @property
    def field_names(self) -> FieldNames:
        """Maps fields of the requests to the client's names."""

    @property
    def warning(self) -> str:
        """What the client should know of its request; empty for nothing."""

    def begin(self, prompt: int, answer: Answer, prompt_token_ids: Sequence[int]) -> None:
        """Called for each prompt before its first piece. answer: the same for all."""

    def event(self, prompt: int, chunk: Chunk, usage: str, earlier: str) -> str:
        """Server-sent events of a piece; may be empty. usage: JSON members to insert, or empty;
        earlier: the same for an event that precedes the piece's tokens."""

    def end(self, usage: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
        """The last events of a stream. metrics: members beside the usage."""

    def document(self, chunks: Sequence[Sequence[Chunk]], usage: Mapping[str, Any]) -> Any:
        """The whole answer. chunks: by prompt."""


def warn(text: str, response: HttpResponse) -> None:
    """Add a warning header."""
    quoted_text = json.dumps(text.replace('"', "").replace("\\", ""))
    response.headers.append(("warning", f"299 baton {quoted_text}"))


MakeFormat = Callable[[Any, BytesOf, ChatStyle], Format]


def timing_of(chunk: Chunk) -> dict[str, Any]:
    """Time spent, in milliseconds, and the workers that served it, from the last piece.
    first_token_ms: the parts of time_to_first_token_ms."""
    timing, first = chunk.timing, chunk.timing.first_token
    return {
        "time_to_first_token_ms": round(timing.time_to_first_token_ms, 3),
        "total_ms": round(timing.total_ms, 3),
        "first_token_ms": {
            part: round(getattr(first, f"{part}_ms"), 3)
            for part in ("tokenize", "queue", "reserve", "prefill", "first_step")
        },
        "transfer_exposed_ms": round(timing.transfer_exposed_ms, 3),
        "transfer_bytes": timing.transfer_bytes,
        "prefill_worker": timing.prefill_worker,
        "decode_worker": timing.decode_worker,
        "num_resumes": timing.num_resumes,
    }


def metrics_of(chunk: Chunk, num_tokens: int) -> dict[str, Any]:
    """vLLM's metrics of an answer of one choice, from its last piece: milliseconds, without the
    time in queues but for queue_time_ms. num_tokens: of the output."""
    timing = chunk.timing
    queue_ms = timing.queue_ms + timing.prefill_queue_ms
    metrics = {
        "time_to_first_token_ms": timing.time_to_first_token_ms - queue_ms,
        "generation_time_ms": timing.decode_ms,
        "queue_time_ms": queue_ms,
        "tokens_per_second": num_tokens * 1e3 / max(timing.total_ms - queue_ms, 1e-3),
    }
    if num_tokens > 1:
        metrics["mean_itl_ms"] = timing.decode_ms / (num_tokens - 1)
    return {name: round(value, 3) for name, value in metrics.items()}


def receipt_of(chunk: Chunk) -> dict[str, Any]:
    """The receipt of the last piece, as protobuf writes it in JSON: numbers of 64 bits as text."""
    return MessageToDict(chunk.receipt, preserving_proto_field_name=True)


FINISHES: Mapping[int, str | None] = {0: None, 1: "stop", 2: "length"}


def stop_reason(chunk: Chunk) -> str | int | None:
    """vLLM's stop_reason: the stop string or stop token of the client that ended the output."""
    match chunk.stop_cause.WhichOneof("kind"):
        case "stop":
            return chunk.stop_cause.stop
        case "stop_token_id":
            return chunk.stop_cause.stop_token_id
    return None


def by_choice(chunks: Sequence[Chunk]) -> Mapping[int, list[Chunk]]:
    """A prompt's pieces by choice, in order of choices."""
    choices: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        choices.setdefault(chunk.choice, []).append(chunk)
    return dict(sorted(choices.items()))


def _id_name(token_id: int) -> bytes:
    """vLLM's name of a token by its id."""
    return b"token_id:%d" % token_id


class OpenAiFormat(ABC):
    """Common part of completions and chats."""

    dialect = OPENAI
    has_event_ids = True
    warning = ""
    kind: str
    """OpenAI's `object` of an answer, and of a stream chunk."""
    chunk_kind: str

    def __init__(self, body: GenerationBody, bytes_of: BytesOf) -> None:
        self._body = body
        self._bytes_of = bytes_of
        self._name_of = _id_name if body.return_tokens_as_token_ids else bytes_of
        """Names tokens in log probabilities."""
        self._answer: Answer | None = None
        self._head = ""
        """Beginning of each event, up to the choice's index."""

    def begin(
        self,
        prompt: int,  # noqa: ARG002
        answer: Answer,
        prompt_token_ids: Sequence[int],  # noqa: ARG002
    ) -> None:
        self._answer = answer
        fields = json.dumps(answer.fields(self.chunk_kind))
        self._head = f'data: {fields[:-1]}, "choices":[{{"index":'

    def end(self, usage: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
        """The usage chunk, if requested, and [DONE]."""
        if not self._body.has_usage_chunk:
            return _DONE
        document = {**self._fields(self.chunk_kind), "choices": [], "usage": usage, **metrics}
        return f"data: {json.dumps(document)}\n\n{_DONE}"

    def _fields(self, kind: str) -> dict[str, Any]:
        return self._answer.fields(kind) if self._answer else {}


async def send_json(
    document: Any, request: HttpRequest, response: HttpResponse, dialect: Dialect = OPENAI
) -> None:
    """Send a complete answer. document: JSON text, or a value to serialize."""
    text = document if isinstance(document, str) else json.dumps(document)
    name_answer(unique_request_id(request.headers), response, dialect)
    await response.send(HTTPStatus.OK, JSON, text.encode())


def name_answer(request_id: str, response: HttpResponse, dialect: Dialect) -> str:
    """Set the request id headers, unless already set. Returns the id in effect."""
    for name, value in response.headers:
        if name == "x-request-id":
            return value
    response.headers += [(name, request_id) for name in dialect.id_headers]
    return request_id
