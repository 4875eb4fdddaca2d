"""A decode worker without an engine: each sequence gets tokens in every step, independent of
readers.

Runs as a child of `bench.host` in place of decode_svc, with its options: --oracle-step-ms is the
step time, and a sequence gets --num-speculative-tokens per step. Tokens repeat a text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from tokenizers import Tokenizer

from baton.config import DecodeOptions
from baton.rpc.server import start_server
from baton.service import OnReady, ReadyReport, main
from baton.types import BlockCounts, KvLayout, Tier, WorkerIdentity, WorkerInfo, WorkerLoad
from baton.v1 import (
    inference_pb2_grpc,
    sampling_pb2,
    sequence_service_pb2,
    sequence_service_pb2_grpc,
    worker_pb2_grpc,
)
from baton.wire import info_to_proto, load_to_proto
from bench.bare_servers import BareInference, Steps, start_bare_sse

_TEXT = Path(__file__).with_name("README.md")
_MODEL_LEN = 1 << 20
_NUM_BLOCKS = 1 << 20
_REPORT_S = 0.5


@dataclass(slots=True)
class _Sequence:
    num_emitted: int
    num_wanted: int


class TokenSource(
    sequence_service_pb2_grpc.SequenceServiceServicer, worker_pb2_grpc.WorkerServiceServicer
):
    """text: token ids to emit. step_tokens: of each sequence. step_s: between steps, 0 for none."""

    def __init__(
        self, info: WorkerInfo, text: Sequence[int], step_tokens: int, step_s: float
    ) -> None:
        self._info = info_to_proto(info)
        self._text = tuple(text)
        self._step_tokens = step_tokens
        self._step_s = step_s

    async def GetWorkerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        return self._info

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802, ARG002
        while True:
            load = WorkerLoad(
                blocks=BlockCounts(_NUM_BLOCKS, 0, 0), local_prefill_threshold=_MODEL_LEN
            )
            yield load_to_proto(load, 0)
            await asyncio.sleep(_REPORT_S)

    async def Serve(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802, ARG002
        live: dict[int, _Sequence] = {}
        opened: asyncio.Queue[int] = asyncio.Queue()
        reader = asyncio.create_task(_read(request_iterator, live, opened))
        pace = _Pace(self._step_s, time.monotonic)
        try:
            while True:
                if not live:
                    news = [await opened.get()]
                    pace.begin()
                else:
                    news = []
                while not opened.empty():
                    news.append(opened.get_nowait())
                yield self._message(live, news, pace.num_due())
                await asyncio.sleep(pace.wait_s())
        finally:
            reader.cancel()

    def _message(
        self, live: dict[int, _Sequence], news: Sequence[int], num_steps: int
    ) -> sequence_service_pb2.ServeResponse:
        response = sequence_service_pb2.ServeResponse()
        for handle in news:
            event = response.events.add(handle=handle)
            event.local_prefill.num_cached_tokens = 0
            event.local_prefill.SetInParent()
        columns = response.tokens
        for handle, sequence in list(live.items()):
            begin = sequence.num_emitted % len(self._text)
            num_due = min(num_steps * self._step_tokens, sequence.num_wanted - sequence.num_emitted)
            token_ids = self._text[begin : begin + num_due]
            columns.handles.append(handle)
            columns.token_indices.append(sequence.num_emitted)
            columns.counts.append(len(token_ids))
            columns.token_ids.extend(token_ids)
            sequence.num_emitted += len(token_ids)
            is_over = sequence.num_emitted == sequence.num_wanted
            columns.finish_reasons.append(_LENGTH if is_over else _NONE)
            if is_over:
                del live[handle]
        return response


class _Pace:
    """Step clock independent of readers: steps that ended during a send are emitted together in the
    next message, as by a decode worker. Without a step time each message is a step."""

    def __init__(self, step_s: float, clock: Callable[[], float]) -> None:
        self._step_s = step_s
        self._clock = clock
        self._next_s = 0.0

    def begin(self) -> None:
        """A step ends now."""
        self._next_s = self._clock()

    def num_due(self) -> int:
        """Steps that ended since the last call, one at least."""
        if not self._step_s:
            return 1
        num_steps = 1 + max(0, int((self._clock() - self._next_s) / self._step_s))
        self._next_s += num_steps * self._step_s
        return num_steps

    def wait_s(self) -> float:
        """Until the next step ends; 0 if it did."""
        return max(0.0, self._next_s - self._clock()) if self._step_s else 0.0


_NONE = sampling_pb2.FINISH_REASON_UNSPECIFIED
_LENGTH = sampling_pb2.FINISH_REASON_LENGTH


async def _read(requests: Any, live: dict[int, _Sequence], opened: asyncio.Queue[int]) -> None:
    async for request in requests:
        if request.HasField("open"):
            sequence = request.open.sequence
            num_emitted = len(sequence.output_token_ids)  # before: a stream goes on behind them
            live[request.open.handle] = _Sequence(num_emitted, sequence.sampling.max_tokens)
            opened.put_nowait(request.open.handle)
        elif request.HasField("abort"):
            live.pop(request.abort.handle, None)


async def serve_source(options: DecodeOptions, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Serve tokens of a text to every opened sequence."""
    tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
    text = tokenizer.encode(_TEXT.read_text(encoding="utf-8")).ids
    info = WorkerInfo(
        identity=WorkerIdentity("source", 1),
        tier=Tier.DECODE,
        model=options.model,
        layout=KvLayout("source", 1, 1, 8, "float32", 16),
        vocab_size=tokenizer.get_vocab_size(),
        max_model_len=_MODEL_LEN,
        num_blocks=_NUM_BLOCKS,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=_MODEL_LEN,
        max_local_prefill_tokens=_MODEL_LEN,
    )
    # Nobody asks for Drain and ListBlocks, nor for the other methods of InferenceService.
    step_s = options.oracle_step_ms / 1000
    source = TokenSource(  # type: ignore[abstract]
        info, text, options.num_speculative_tokens, step_s
    )

    step = text[: options.num_speculative_tokens]
    steps = Steps(step_s)
    bare = BareInference(tokenizer, step, steps)  # type: ignore[abstract]

    def register(server: grpc.aio.Server) -> Sequence[str]:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(source, server)
        sequence_service_pb2_grpc.add_SequenceServiceServicer_to_server(source, server)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(bare, server)
        return ("baton.v1.WorkerService",)

    server = await start_server(f"{options.host}:{options.port}", register)
    try:
        bare_text = tokenizer.decode(step)
        async with start_bare_sse(options.host, bare_text, len(step), steps) as http_address:
            on_ready(ReadyReport(server.address, {}, http_address=http_address))
            await stop.wait()
    finally:
        await server.stop()


if __name__ == "__main__":
    main(DecodeOptions, serve_source, "source")
