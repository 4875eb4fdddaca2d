"""The public gRPC service: turns calls into validated requests, and streams their output."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

from baton.errors import BatonError, Cancelled, DeadlineExceeded, EngineFault
from baton.rpc.api_key import shown_digest
from baton.rpc.interceptor import write_to
from baton.rpc.status import REQUEST_ID_KEY
from baton.sampling_params import MAX_CHOICES
from baton.telemetry import no_telemetry
from baton.types import Tier, WorkerInfo
from baton.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from baton.wire import numerics_to_proto
from gateway.intake.chat import ChatRenderer
from gateway.intake.grammars import GrammarCompiler
from gateway.intake.model_facts import ModelFacts
from gateway.intake.request import ValidatedRequest, unique_request_id
from gateway.intake.sampling_rules import num_returned
from gateway.intake.tokenizer import Tokenizer, TooManyTokens
from gateway.intake.validator import (
    Ids,
    Tokenized,
    check_detokenize,
    check_model,
    check_request,
    check_tokenize,
    resolve,
    too_long,
)
from gateway.intake.violations import given
from gateway.output.time_limits import fail_at
from gateway.request.driver import RequestDeps, RequestDriver
from gateway.routing.fleet import Fleet, Worker
from gateway.telemetry.recorder import GatewayRecorder, RequestRecord

#: Tokens that any model is taken to have room for until a worker says.
_UNKNOWN_LEN = 2**20

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """model_name: what requests call the model. request_timeout_s: for requests without a deadline.
    has_api_keys: whether callers have shown one; each key is an account then, and else each
    cache_salt."""

    model_name: str
    request_timeout_s: float
    has_api_keys: bool = False


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Belongs to one event loop."""

    def __init__(
        self,
        options: ServiceOptions,
        deps: RequestDeps,
        tokenizer: Tokenizer,
        chat: ChatRenderer | None,
        grammars: GrammarCompiler,
        recorder: GatewayRecorder | None = None,
        *,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """chat: None if the model has no chat template. recorder: on the clock of `deps`; None for
        none."""
        self._options = options
        self._deps = deps
        self._fleet: Fleet = deps.fleet
        self._tokenizer = tokenizer
        self._chat = chat
        self._grammars = grammars
        self._now_ns = now_ns
        self._infos: tuple[WorkerInfo, ...] = ()
        """Of decode workers, when `_known_facts` was made of it."""
        self._known_facts = self._facts_by(self._infos)
        self._clock = deps.clock or time.monotonic
        self._recorder = recorder or GatewayRecorder(
            no_telemetry(), options.model_name, self._clock
        )

    async def Generate(  # type: ignore[override]  # noqa: N802, the name in the .proto
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> None:
        """Streams by context.write, so that a slow client is seen."""
        arrival_s = self._clock()
        is_chat = request.prompt.WhichOneof("kind") == "chat"
        metadata = context.invocation_metadata()
        record = self._recorder.begin(metadata, arrival_s, is_chat=is_chat)
        error: str | None = EngineFault.reason
        try:
            await self._generate(request, context, record)
            error = None
        except BatonError as failure:
            error = failure.reason
            raise
        except asyncio.CancelledError:
            error = Cancelled.reason
            raise
        finally:
            self._recorder.end(record, error)

    async def _generate(
        self, request: inference_pb2.GenerateRequest, context: _Context, record: RequestRecord
    ) -> None:
        metadata = context.invocation_metadata()
        request_id = unique_request_id(metadata)
        account = shown_digest(metadata) if self._options.has_api_keys else b""
        remaining_s = context.time_remaining()
        timeout_s = self._options.request_timeout_s if remaining_s is None else remaining_s

        deadline_s = asyncio.get_running_loop().time() + timeout_s

        async def on_admitted() -> None:
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))

        try:
            async with fail_at(deadline_s, _too_late):
                validated = await self._validated(request, request_id, record)
                validated = replace(validated, account=account or validated.spec.tenant)
        except BatonError as error:
            error.request_id = request_id
            raise
        write = functools.partial(write_to, context)
        driver = RequestDriver(self._deps, validated, write, deadline_s, record.timeline)
        await driver.run(on_admitted)

    async def Tokenize(  # noqa: N802
        self,
        request: inference_pb2.TokenizeRequest,
        context: _Context,  # noqa: ARG002, the signature of the .proto
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a prompt, as Generate would use them."""
        facts = self._facts()
        check_tokenize(request, facts)
        token_ids = await self._tokenize(request.prompt, facts)
        return inference_pb2.TokenizeResponse(
            token_ids=token_ids, max_model_len=facts.max_model_len
        )

    async def Detokenize(  # noqa: N802
        self,
        request: inference_pb2.DetokenizeRequest,
        context: _Context,  # noqa: ARG002
    ) -> inference_pb2.DetokenizeResponse:
        """Text of token ids."""
        check_detokenize(request, self._facts())
        token_ids = list(request.token_ids)
        text = await self._tokenizer.decode_all(token_ids, request.skip_special_tokens)
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(  # noqa: N802
        self,
        request: inference_pb2.ListModelsRequest,  # noqa: ARG002
        context: _Context,  # noqa: ARG002
    ) -> inference_pb2.ListModelsResponse:
        """The one model."""
        return inference_pb2.ListModelsResponse(models=[self._model()])

    async def GetModel(  # noqa: N802
        self,
        request: inference_pb2.GetModelRequest,
        context: _Context,  # noqa: ARG002
    ) -> inference_pb2.GetModelResponse:
        """The one model, and its workers."""
        check_model(request.model, self._facts())
        return inference_pb2.GetModelResponse(model=self._model())

    async def _validated(
        self, request: inference_pb2.GenerateRequest, request_id: str, record: RequestRecord
    ) -> ValidatedRequest:
        facts = self._facts()
        check_request(request, facts)
        started_s = self._clock()
        prompt_token_ids = await self._tokenize(request.prompt, facts)
        bad_words = await self._tokenizer.ways_to_write(request.sampling.bad_words)
        tokenize_ms = (self._clock() - started_s) * 1e3
        grammar = await self._grammar(request.sampling)
        ids = Ids(
            request_id,
            secrets.randbits(64),
            self._now_ns(),
            record.traceparent,
            record.tracestate,
        )
        spec, text = resolve(request, Tokenized(prompt_token_ids, bad_words, grammar), facts, ids)
        record.spec = spec
        return ValidatedRequest(
            spec,
            text,
            record.timeline.arrival_s,
            tokenize_ms,
            num_returned=num_returned(request.sampling),
            echo_text=await self._echo_text(request, spec.prompt_token_ids),
        )

    async def _grammar(self, params: sampling_pb2.SamplingParams) -> bytes:
        if not params.HasField("structured_output"):
            return b""
        return await self._grammars.compile(params.structured_output)

    async def _echo_text(
        self, request: inference_pb2.GenerateRequest, prompt_token_ids: tuple[int, ...]
    ) -> str | None:
        """The prompt's text if it is to be echoed: as it was given, or what its tokens say."""
        if not request.sampling.echo:
            return None
        if request.prompt.WhichOneof("kind") == "text":
            return request.prompt.text
        skips = given(request.sampling, "skip_special_tokens", True)
        return await self._tokenizer.decode_all(prompt_token_ids, skips)

    async def _tokenize(self, prompt: inference_pb2.Prompt, facts: ModelFacts) -> tuple[int, ...]:
        match prompt.WhichOneof("kind"):
            case "text":
                return await self._encode(prompt.text, facts, add_special_tokens=True)
            case "chat" if self._chat is not None:
                messages = [(message.role, message.content) for message in prompt.chat.messages]
                text = await self._chat.render(messages)
                # The template wrote the special tokens already.
                return await self._encode(text, facts, add_special_tokens=False)
            case _:
                return tuple(prompt.token_ids.ids)

    async def _encode(
        self, text: str, facts: ModelFacts, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        most = facts.max_prompt_tokens
        try:
            return await self._tokenizer.encode(
                text, add_special_tokens=add_special_tokens, max_tokens=most
            )
        except TooManyTokens as error:
            raise too_long(error.num_tokens, facts) from None

    def _facts(self) -> ModelFacts:
        infos = self._fleet.known(Tier.DECODE)
        if infos is not self._infos:
            self._infos, self._known_facts = infos, self._facts_by(infos)
        return self._known_facts

    def _facts_by(self, infos: Sequence[WorkerInfo]) -> ModelFacts:
        """By what decode workers reported; before any has, by the model's own files."""
        files = self._tokenizer.facts
        fallback = files.max_model_len or _UNKNOWN_LEN
        return ModelFacts(
            name=self._options.model_name,
            vocab_size=infos[0].vocab_size if infos else self._tokenizer.vocab_size,
            max_model_len=max((i.max_model_len for i in infos), default=fallback),
            max_kv_tokens=max(
                (i.num_blocks * i.layout.block_size for i in infos), default=fallback
            ),
            eos_token_ids=files.eos_token_ids,
            has_chat_template=self._chat is not None,
            max_num_seqs=max((i.max_num_seqs for i in infos), default=MAX_CHOICES),
            max_token_chars=self._tokenizer.max_token_chars,
        )

    def _model(self) -> inference_pb2.Model:
        facts = self._facts()
        return inference_pb2.Model(
            name=facts.name,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            has_chat_template=facts.has_chat_template,
            workers=[_status_of(worker) for worker in self._fleet.workers.values()],
        )


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("the request's time was over before its prompt was tokenized")


def _status_of(worker: Worker) -> inference_pb2.WorkerStatus:
    info, load = worker.info, worker.load
    return inference_pb2.WorkerStatus(
        worker_id=info.identity.worker_id if info else "",
        address=worker.address,
        tier=worker.tier.name.lower(),
        state=worker.state.value,
        reason=worker.reason,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_blocks=load.blocks.free,
        num_cached_blocks=load.blocks.cached,
        num_leased_blocks=load.blocks.leased,
        num_blocks=info.num_blocks if info else 0,
        block_size=info.layout.block_size if info else 0,
        num_in_flight=worker.num_in_flight,
        local_prefill_threshold=load.local_prefill_threshold,
        numerics=numerics_to_proto(info.numerics) if info else None,
    )
