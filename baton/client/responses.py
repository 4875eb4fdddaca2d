"""Reads the messages that arrive. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from baton.client.results import (
    Choice,
    Chunk,
    Completion,
    Model,
    TimeToFirstToken,
    Timing,
    Tokenization,
    Usage,
    WorkerStatus,
)
from baton.errors import BatonError
from baton.types import FinishReason, NumericsClass, TokenLogprobs
from baton.v1 import inference_pb2, sampling_pb2

_T = TypeVar("_T", Usage, TimeToFirstToken, Timing, WorkerStatus)


def chunk_of(response: inference_pb2.GenerateResponse) -> Chunk:
    """Raises BatonError for a finish reason that this version does not know."""
    return Chunk(
        token_index=response.token_index,
        token_ids=tuple(response.token_ids),
        text=response.text,
        logprobs=tuple(map(_logprobs, response.logprobs)),
        finish_reason=_finish_reason(response.finish_reason),
        stop=_stop(response),
        usage=_same_fields(Usage, response.usage) if response.HasField("usage") else None,
        timing=_timing(response.timing) if response.HasField("timing") else None,
        choice=response.choice,
        request_id=response.request_id,
        score=response.score if response.HasField("score") else None,
        prompt_token_ids=tuple(response.prompt_token_ids),
        prompt_logprobs=tuple(map(_logprobs, response.prompt_logprobs)),
    )


def _logprobs(message: sampling_pb2.PositionLogprobs) -> TokenLogprobs:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprobs(message.chosen.token_id, message.chosen.logprob, top)


def _timing(message: inference_pb2.RequestTiming) -> Timing:
    first_token = _same_fields(TimeToFirstToken, message.first_token)
    return replace(_same_fields(Timing, message), first_token=first_token)


def tokenization_of(response: inference_pb2.TokenizeResponse) -> Tokenization:
    return Tokenization(tuple(response.token_ids), response.max_model_len)


def models_of(response: inference_pb2.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(map(model_of, response.models))


def model_of(model: inference_pb2.Model) -> Model:
    return Model(
        name=model.name,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        has_chat_template=model.has_chat_template,
        workers=tuple(map(_worker_status, model.workers)),
    )


def _worker_status(message: inference_pb2.WorkerStatus) -> WorkerStatus:
    told = message.numerics
    numerics = NumericsClass(told.device, told.level, told.dtype, told.kernels)
    return replace(_same_fields(WorkerStatus, message), numerics=numerics)


@dataclass(slots=True)
class _Output:
    """A choice so far."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    score: float | None = None


class StreamReader:
    """Checks that the pieces of a stream follow each other, and that each choice ends."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.num_chunks = 0
        self.has_ended = False
        self._num_tokens: dict[int, int] = {}
        self._is_open: dict[int, bool] = {}

    def accept(self, response: inference_pb2.GenerateResponse) -> Chunk:
        """Raises BatonError for a piece that does not follow the choice's last one."""
        chunk = chunk_of(response)
        self.request_id = chunk.request_id or self.request_id
        expected = self._num_tokens.get(chunk.choice, 0)
        if chunk.token_index != expected:
            raise self._broken(f"jumped from token {expected} to {chunk.token_index}")
        if not self._is_open.get(chunk.choice, True):
            raise self._broken("went on after its end")
        self._num_tokens[chunk.choice] = expected + len(chunk.token_ids)
        self._is_open[chunk.choice] = chunk.finish_reason is None
        self.num_chunks += 1
        return chunk

    def end(self) -> None:
        """The server has ended the stream. Raises BatonError if it is not the end of all
        choices."""
        if not self._is_open or any(self._is_open.values()):
            raise self._broken("ended without a last piece")
        self.has_ended = True

    def _broken(self, how: str) -> BatonError:
        return BatonError(f"the stream {how}", request_id=self.request_id)


def completion_of(request_id: str, chunks: Iterable[Chunk]) -> Completion:
    """All pieces of an ended stream, put together."""
    outputs: dict[int, _Output] = {}
    usage, timing = Usage(), Timing()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    for chunk in chunks:
        output = outputs.setdefault(chunk.choice, _Output())
        output.token_ids += chunk.token_ids
        output.texts.append(chunk.text)
        output.logprobs += chunk.logprobs
        output.finish_reason = chunk.finish_reason
        output.stop = chunk.stop
        output.score = chunk.score
        prompt_token_ids = chunk.prompt_token_ids or prompt_token_ids
        prompt_logprobs = chunk.prompt_logprobs or prompt_logprobs
        usage, timing = chunk.usage or usage, chunk.timing or timing
    choices = tuple(
        Choice(
            index=position,
            token_ids=tuple(output.token_ids),
            text="".join(output.texts),
            logprobs=tuple(output.logprobs),
            finish_reason=output.finish_reason or FinishReason.NONE,
            stop=output.stop,
            score=output.score,
        )
        for position, output in sorted(outputs.items())
    )
    return Completion(request_id, choices, usage, timing, prompt_token_ids, prompt_logprobs)


def _finish_reason(value: int) -> FinishReason | None:
    if value == FinishReason.NONE:
        return None
    try:
        return FinishReason(value)
    except ValueError:
        raise BatonError(f"finish reason {value} is not known here; upgrade this client") from None


def _stop(response: inference_pb2.GenerateResponse) -> str | int | None:
    match response.stop_cause.WhichOneof("kind"):
        case "stop":
            return response.stop_cause.stop
        case "stop_token_id":
            return response.stop_cause.stop_token_id
    return None


def _same_fields(cls: type[_T], message: Any) -> _T:
    """A dataclass from the message whose fields have the same names."""
    return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})
