"""Baton's output stream as OpenEngine events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    HandoffFailed,
    InvalidRequest,
    ModelNotFound,
    NoWorkers,
    Overloaded,
    RetriableError,
)
from baton.v1 import inference_pb2, sampling_pb2
from gateway.intake.token_bytes import text_of
from gateway.openengine.v1 import openengine_pb2 as oe

_CODES: tuple[tuple[type[BatonError], oe.ErrorCode.ValueType], ...] = (
    (InvalidRequest, oe.ERROR_CODE_INVALID_ARGUMENT),
    (ModelNotFound, oe.ERROR_CODE_MODEL_NOT_FOUND),
    (Overloaded, oe.ERROR_CODE_OVERLOADED),
    (NoWorkers, oe.ERROR_CODE_OVERLOADED),
    (HandoffFailed, oe.ERROR_CODE_KV_TRANSFER_FAILED),
    (Draining, oe.ERROR_CODE_DRAINING),
    (Cancelled, oe.ERROR_CODE_CANCELLED),
    (DeadlineExceeded, oe.ERROR_CODE_CANCELLED),
)


def engine_error(error: BatonError) -> oe.EngineError:
    """OpenEngine error of an accepted request."""
    codes = (code for kind, code in _CODES if isinstance(error, kind))
    return oe.EngineError(
        code=next(codes, oe.ERROR_CODE_INTERNAL),
        message=error.message,
        retryable=isinstance(error, RetriableError),
    )


class EventStream:
    """Events of one request. Each has the tokens and text of one piece, not cumulative ones."""

    def __init__(
        self,
        write: Callable[[oe.GenerateResponse], Coroutine[Any, Any, None]],
        request_id: str,
        request: inference_pb2.GenerateRequest,
        first_scored: int,
        eos_token_ids: Collection[int],
        bytes_of: Callable[[int], bytes],
    ) -> None:
        """request: Baton's request, with token ids as prompt. first_scored: first prompt position
        with log probabilities."""
        self._write = write
        self._request_id = request_id
        self._prompt_token_ids = request.prompt.token_ids.ids
        self._first_scored = max(1, first_scored)
        self._owes_prompt = request.sampling.HasField("prompt_logprobs")
        self._eos_token_ids = eos_token_ids
        self._bytes_of = bytes_of
        self._last_tokens: dict[int, int] = {}
        """By choice."""
        self._num_tokens = 0
        self._running = set(range(max(1, request.sampling.n)))
        self._sending: asyncio.Task[None] | None = None

    async def write_piece(self, piece: inference_pb2.GenerateResponse) -> None:
        """See gateway.output.delivery.Write."""
        choice = piece.choice
        if choice == 0 and self._owes_prompt:
            self._owes_prompt = False
            await self._send(self._response(prompt=self._prompt(piece.prompt_logprobs)))
        if piece.token_ids or piece.text:
            positions = piece.logprobs or (None,) * len(piece.token_ids)
            tokens = map(self._token, piece.token_ids, positions)
            output = oe.TokenOutput(output_index=choice, tokens=tokens, text=piece.text)
            # Counted before sending, because an abort may cancel the wait but not the send.
            self._num_tokens += len(piece.token_ids)
            await self._send(self._response(token=output))
        if piece.token_ids:
            self._last_tokens[choice] = piece.token_ids[-1]
        if piece.finish_reason:
            self._running.discard(choice)
            finished = oe.GenerationFinished(output_index=choice, reason=_reason(piece))
            if piece.finish_reason == sampling_pb2.FINISH_REASON_STOP:
                finished.stop_match.CopyFrom(self._stop_match(piece))
            usage = _usage(piece.usage) if piece.HasField("usage") else None
            await self._send(self._response(finished=finished, usage=usage))

    async def cancel(self) -> None:
        """End all outputs that have not ended."""
        num_prompt_tokens = len(self._prompt_token_ids)
        usage = oe.Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self._num_tokens,
            total_tokens=num_prompt_tokens + self._num_tokens,
        )
        running = sorted(self._running)
        for choice in running:
            finished = oe.GenerationFinished(
                output_index=choice, reason=oe.FINISH_REASON_CANCELLED, message="aborted"
            )
            is_last = choice == running[-1]
            await self._send(self._response(finished=finished, usage=usage if is_last else None))
        self._running.clear()

    async def fail(self, error: BatonError) -> None:
        """End all outputs with the error."""
        await self._send(self._response(error=engine_error(error)))

    async def _send(self, response: oe.GenerateResponse) -> None:
        """Send one event at a time, as grpc requires. A send that an abort or deadline stopped
        waiting for completes before the next."""
        if self._sending is not None:
            with suppress(Cancelled):
                await self._sending
        self._sending = asyncio.create_task(self._write(response))
        self._sending.add_done_callback(_forget_failure)
        await asyncio.shield(self._sending)
        self._sending = None

    def _response(
        self,
        *,
        prompt: oe.PromptOutput | None = None,
        token: oe.TokenOutput | None = None,
        finished: oe.GenerationFinished | None = None,
        error: oe.EngineError | None = None,
        usage: oe.Usage | None = None,
    ) -> oe.GenerateResponse:
        return oe.GenerateResponse(
            request_id=self._request_id,
            prompt=prompt,
            token=token,
            finished=finished,
            error=error,
            usage=usage,
        )

    def _prompt(self, positions: Sequence[sampling_pb2.PositionLogprobs]) -> oe.PromptOutput:
        scored = (None, *positions)
        return oe.PromptOutput(
            tokens=[
                self._token(token_id, scored[at] if at >= self._first_scored else None)
                for at, token_id in enumerate(self._prompt_token_ids)
            ]
        )

    def _token(
        self, token_id: int, position: sampling_pb2.PositionLogprobs | None = None
    ) -> oe.TokenInfo:
        info = oe.TokenInfo(token_id=token_id, token=self._text(token_id))
        if position is None:
            return info
        info.logprob = position.chosen.logprob
        for rank, entry in enumerate(position.top, start=1):
            if entry.token_id == token_id:
                info.rank = rank
            info.candidates.add(
                token_id=entry.token_id,
                logprob=entry.logprob,
                token=self._text(entry.token_id),
                rank=rank,
            )
        return info

    def _text(self, token_id: int) -> str:
        return text_of(self._bytes_of(token_id))

    def _stop_match(self, piece: inference_pb2.GenerateResponse) -> oe.StopMatch:
        last = self._last_tokens.get(piece.choice, -1)
        match piece.stop_cause.WhichOneof("kind"):
            case "stop":
                return oe.StopMatch(stop_text=piece.stop_cause.stop)
            case "stop_token_id":
                return oe.StopMatch(stop_token_id=piece.stop_cause.stop_token_id)
            case _ if last in self._eos_token_ids:
                return oe.StopMatch(eos_token_id=last)
            case _:
                return oe.StopMatch()


def _forget_failure(sending: asyncio.Task[None]) -> None:
    """Retrieve the exception: a waiting caller gets it, and without one the connection is lost
    anyway."""
    if not sending.cancelled():
        sending.exception()


def _reason(piece: inference_pb2.GenerateResponse) -> oe.FinishReason.ValueType:
    is_stop = piece.finish_reason == sampling_pb2.FINISH_REASON_STOP
    return oe.FINISH_REASON_STOP if is_stop else oe.FINISH_REASON_LENGTH


def _usage(usage: inference_pb2.Usage) -> oe.Usage:
    return oe.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        cached_prompt_tokens=max(usage.cached_tokens, usage.decode_cached_tokens),
    )
