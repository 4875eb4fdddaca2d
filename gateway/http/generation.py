"""Runs a request of the HTTP door: submits its prompts to `Serving`, and sends the output as
server-sent events, or as one JSON document."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import secrets
import time
import zlib
from array import array
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError
from baton.rpc.interceptor import given_request_id
from baton.sampling_params import MAX_CHOICES
from baton.types import SequenceSpec
from baton.v1 import inference_pb2, sampling_pb2
from gateway.http.connection import JSON, HttpRequest, HttpResponse
from gateway.http.errors import invalid, shown_value
from gateway.http.format import Answer, Chunk, Format, metrics_of, receipt_of, timing_of
from gateway.http.json_body import MAX_PROMPTS
from gateway.intake.request import ValidatedRequest
from gateway.long_work import Pacer
from gateway.serving import Call, Serving

EVENTS = "text/event-stream; charset=utf-8"


class Usage:
    """Token counts of an answer, summed over its prompts."""

    def __init__(self, num_prompts: int) -> None:
        self.num_prompt_tokens = 0
        self._num_output_tokens = [0] * num_prompts
        self._num_cached_tokens = 0
        self.last: Chunk | None = None
        """The piece with the timing, which ends the last output."""

    def add(self, prompt: int, chunk: Chunk) -> None:
        self._num_output_tokens[prompt] += len(chunk.token_ids)
        if chunk.HasField("usage"):
            usage = chunk.usage
            self.last = chunk
            # Includes choices that best_of discarded.
            self._num_output_tokens[prompt] = usage.completion_tokens
            self._num_cached_tokens += max(usage.cached_tokens, usage.decode_cached_tokens)

    def add_earlier(self, prompt: int, num_tokens: int) -> None:
        """Add the output that an earlier stream sent."""
        self._num_output_tokens[prompt] += num_tokens

    def fields(self) -> dict[str, Any]:
        num_output_tokens = sum(self._num_output_tokens)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": self.num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }


class Generation:
    """One request. `run` raises BatonError only before anything was sent."""

    def __init__(
        self,
        serving: Serving,
        form: Format,
        request: HttpRequest,
        response: HttpResponse,
        *,
        has_metrics: bool = False,
    ) -> None:
        """has_metrics: give answers vLLM's metrics. Raises InvalidRequest if the Last-Event-ID does
        not fit the request."""
        self._serving = serving
        self._form = form
        self._metadata = request.headers
        self._timeout_s = _timeout_s_of(request, serving.request_timeout_s)
        self._response = response
        self._usage = Usage(len(form.requests))
        self._answer: Answer | None = None
        self._chunks: list[list[Chunk]] = [[] for _ in form.requests]
        """Pieces by prompt, unless streamed."""
        self._has_timing = bool(form.body.return_timing)
        self._has_receipt = bool(form.body.return_receipt)
        self._has_metrics = has_metrics
        self._has_usage = form.body.has_usage_everywhere
        """Whether each piece has usage; if only the last has it, other pieces say null."""
        self._no_usage = ',"usage":null' if form.body.has_usage_chunk else ""
        self._usage_text = ""
        """Usage member of the last piece, while it is current."""
        last_event_id = request.header(LAST_EVENT_ID.lower())
        self._is_taken_up = bool(last_event_id or form.body.resume_from)
        """Whether an earlier stream began the answer."""
        self._event_ids = _event_ids_of(form, last_event_id)

    async def run(self) -> None:
        """Run the request and send the whole answer."""
        if not self._form.body.is_streamed:
            document = await self.whole()
            await self._response.send(200, JSON, json.dumps(document).encode())
            return
        await self._run_all()
        if self._event_ids is not None:
            self._event_ids.check_end()
        if not self._response.has_started:  # only the end was left to send
            self._response.start(EVENTS)
        end = self._form.end(self._usage.fields(), self._metrics())
        await self._response.end(end.encode())

    async def whole(self) -> dict[str, Any]:
        """Run a request that is not streamed and return its answer."""
        await self._run_all()
        document: dict[str, Any] = self._form.document(self._chunks, self._usage.fields())
        document |= self._metrics()
        if self._has_timing:
            document["timing"] = self._of_each_prompt(timing_of)
        if self._has_receipt:
            document["receipt"] = self._of_each_prompt(receipt_of)
        return document

    def _metrics(self) -> dict[str, Any]:
        """The member `metrics`, if wanted; null for several choices or prompts."""
        if not self._has_metrics:
            return {}
        (first, *others), last = self._form.requests, self._usage.last
        if others or first.sampling.n > 1 or last is None:
            return {"metrics": None}
        return {"metrics": metrics_of(last, self._usage.fields()["completion_tokens"])}

    def _of_each_prompt(self, made: Callable[[Chunk], Any]) -> Any:
        """What the last piece gives: a list for several prompts."""
        found = [made(chunks[-1]) for chunks in self._chunks if chunks]
        return found if len(self._chunks) > 1 else next(iter(found), None)

    async def _run_all(self) -> None:
        """Run all prompts concurrently; the first failure cancels the others."""
        write = self._write_event if self._form.body.is_streamed else self._keep
        if len(self._form.requests) == 1:
            await self._run_one(self._form.requests[0], 0, write)
            return
        pacer = Pacer()
        try:
            async with asyncio.TaskGroup() as group:
                for index, request in enumerate(self._form.requests):
                    group.create_task(self._run_one(request, index, write))
                    await pacer.advance(request.ByteSize())
        except* BatonError as failures:
            raise _first(failures) from None

    async def _run_one(
        self, request: inference_pb2.GenerateRequest, index: int, write: Any
    ) -> None:
        write = functools.partial(write, index)
        call = Call(
            self._metadata,
            write,
            timeout_s=self._timeout_s,
            on_admitted=functools.partial(self._begin, index),
        )
        self._serving.check_room(request, call)
        await self._serving.generate(request, call)

    async def _begin(self, index: int, validated: ValidatedRequest) -> None:
        self._usage.num_prompt_tokens += len(validated.spec.prompt_token_ids)
        self._usage_text = ""
        for so_far in validated.resume_from.values():  # only one prompt can be resumed
            self._usage.add_earlier(0, len(so_far.token_ids))
        self._answer = self._answer or self._new_answer(validated.spec)
        self._form.begin(index, self._answer, validated.spec.prompt_token_ids)

    def _new_answer(self, spec: SequenceSpec) -> Answer:
        request_id = spec.request_id
        self._response.headers += [(name, request_id) for name in self._form.dialect.id_headers]
        if self._is_taken_up:  # keep the request id of the first part
            request_id = given_request_id(self._metadata) or request_id
        return Answer(
            f"{self._form.id_prefix}{request_id}",
            int(time.time()),
            self._form.body.model or self._serving.facts.name,
            self._serving.fingerprint,
            spec.sampling,
        )

    def _keep(self, index: int, chunk: Chunk) -> None:
        self._usage.add(index, chunk)
        self._chunks[index].append(chunk)

    def _write_event(self, index: int, chunk: Chunk) -> Coroutine[Any, Any, object] | None:
        usage_before = self._usage_text or self._usage_so_far()
        self._usage.add(index, chunk)
        self._usage_text = ""
        new: Chunk | None = chunk
        if self._event_ids is not None:
            choice = index * max(1, self._form.requests[0].sampling.n) + chunk.choice
            earlier, new = self._event_ids.split(choice, chunk)
            if earlier is not None:
                self._form.event(index, earlier, "", "")  # restores the parser's state
        text = self._event(index, new, usage_before) if new is not None else ""
        if not text:
            return None
        if self._event_ids is not None:
            text = f"{text[:-1]}id: {self._event_ids}\n\n"
        # Sent no earlier, so that a failure before the first piece has its own status.
        if not self._response.has_started:
            self._response.start(EVENTS)
        return self._response.write(text.encode())

    def _event(self, index: int, chunk: Chunk, usage_before: str) -> str:
        usage = self._usage_text = self._usage_so_far()
        if self._has_timing and chunk.HasField("timing"):
            usage += f',"timing":{json.dumps(timing_of(chunk))}'
        if chunk.HasField("receipt"):
            usage += f',"receipt":{json.dumps(receipt_of(chunk))}'
        return self._form.event(index, chunk, usage, usage_before)

    def _usage_so_far(self) -> str:
        """The usage member of a piece."""
        if self._has_usage:
            return f',"usage":{json.dumps(self._usage.fields())}'
        return self._no_usage


def _timeout_s_of(request: HttpRequest, longest_s: float) -> float:
    """The time that the proxy in front gives the request, as Envoy sends it, at most longest_s,
    which is that of requests without one."""
    text = request.header(TIMEOUT_MS)
    return min(int(text) / 1e3, longest_s) if _TIMEOUT.fullmatch(text) else longest_s


def _event_ids_of(form: Format, last: str) -> EventIds | None:
    """Event ids of the stream, if requested; sets the seed of the form's requests. last: the
    client's Last-Event-ID. Raises InvalidRequest."""
    options, fault = form.body.stream_options, ""
    if not last and not (options and options.include_event_ids and form.body.is_streamed):
        return None
    field = LAST_EVENT_ID if last else "stream_options.include_event_ids"
    if not form.has_event_ids:
        fault = "events of this path have no ids; leave it out, and give resume_from"
    elif not form.body.is_streamed:
        fault = "goes with stream; set it to true"
    elif form.body.resume_from:
        fault = "given with resume_from; leave out one of them"
    elif form.body.use_beam_search:
        fault = "given with use_beam_search, which sends nothing before its end; leave it out"
    if fault:
        raise invalid(field, fault)
    seeds = [r.sampling.seed for r in form.requests if r.sampling.HasField("seed")]
    if last:
        ids = EventIds.behind(last)
        if seeds and seeds[0] != ids.seed:
            fault = f"of a stream with seed {ids.seed}, not {seeds[0]}; give the same, or none"
            raise invalid("seed", fault)
    else:
        ids = EventIds(seeds[0] if seeds else secrets.randbits(64))
    for request in form.requests:
        request.sampling.seed = ids.seed
    return ids


def _first(failures: BaseExceptionGroup[BatonError]) -> BatonError:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


LAST_EVENT_ID = "Last-Event-ID"

#: Envoy's header; 0, as of routes without a timeout, is none.
TIMEOUT_MS = "x-envoy-expected-rq-timeout-ms"
_TIMEOUT = re.compile(r"[1-9][0-9]{0,9}")


_SEED = re.compile(r"[0-9a-f]{1,16}")
_PLACE = re.compile(r"([0-9a-f]{1,8})\.([0-9a-f]{1,8})\.([0-9a-f]{1,8})\.([0-9a-f]{1,8})(!?)")

_OTHER_ANSWER = (
    "its answer cannot be drawn again: the request is another one, or workers round otherwise now; "
    "begin anew, without it"
)


@dataclass(slots=True)
class _Place:
    """Progress of one choice. checksum: CRC-32 of its token ids, 4 bytes each."""

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
    """Event ids of one stream; str() is the id of the next event.

    A client of server-sent events resumes by sending the id of its last event as `Last-Event-ID`
    (WHATWG HTML, "Server-sent events") with the same request. The id holds the seed and the
    progress of each choice. The gateway keeps no state of broken streams: it generates the answer
    again with the seed and skips what the client has. A checksum of the skipped tokens prevents
    joining two different answers.

        SEED[;CHOICE.TOKENS.CHARACTERS.CHECKSUM[!]]...   !: ended; hexadecimal numbers
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._places: dict[int, _Place] = {}
        self._to_leave_out: dict[int, _Place] = {}
        """Choices that have not yet reached the client's progress."""

    @classmethod
    def behind(cls, last: str) -> EventIds:
        """Event ids of the stream after event `last`. Raises InvalidRequest if it is malformed."""
        seed, *places = last.split(";", MAX_CHOICES * MAX_PROMPTS)
        found = [_PLACE.fullmatch(place) for place in places]
        if not _SEED.fullmatch(seed) or not all(found):
            fault = f"{shown_value(last)}: no id that events here have; give it as it came"
            raise invalid(LAST_EVENT_ID, fault)
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
        """Split a piece into the part that the client has and the new part. Raises InvalidRequest
        if the client has a different answer."""
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
            raise invalid(LAST_EVENT_ID, _OTHER_ANSWER)
        if new is not None:
            at.add(new)
        return earlier, new

    def check_end(self) -> None:
        """Raises InvalidRequest if the stream ends before the client's progress."""
        if self._to_leave_out:
            raise invalid(LAST_EVENT_ID, _OTHER_ANSWER)


def _cut(chunk: Chunk, num_tokens: int, num_chars: int) -> tuple[Chunk, Chunk]:
    """Split a piece in two. Members of an output's beginning go to the first, members of its end to
    the second."""
    first, second = Chunk(), Chunk()
    first.CopyFrom(chunk)
    second.CopyFrom(chunk)
    del first.token_ids[num_tokens:], first.logprobs[num_tokens:]
    del second.token_ids[:num_tokens], second.logprobs[:num_tokens]
    first.text, second.text = chunk.text[:num_chars], chunk.text[num_chars:]
    first.finish_reason = sampling_pb2.FINISH_REASON_UNSPECIFIED
    for name in ("stop_cause", "score", "usage", "timing", "receipt"):
        first.ClearField(name)
    second.ClearField("prompt_token_ids")
    second.ClearField("prompt_logprobs")
    return first, second
