"""Request handling shared by gRPC and HTTP: validates, tokenizes and runs a request, and reports it
to telemetry."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton import __version__
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    FieldViolation,
    InvalidRequest,
    ModelNotFound,
    NoWorkers,
    Overloaded,
)
from baton.rpc.api_key import shown_digest
from baton.rpc.interceptor import given_request_id
from baton.sampling_params import MAX_CHOICES, MAX_LOGPROBS
from baton.telemetry import no_telemetry
from baton.telemetry.spans import trace_of
from baton.types import Slo, Tier, WorkerInfo, tenant_of
from baton.v1 import inference_pb2, sampling_pb2
from baton.wire import numerics_to_proto, tier_load_to_proto
from gateway.chat.renderer import ChatRenderer, more_of
from gateway.intake.grammars import GrammarCompiler
from gateway.intake.request import ValidatedRequest
from gateway.intake.rules import ModelFacts, given, shown
from gateway.intake.token_bytes import ends_with
from gateway.intake.tokenizer import Tokenizer, TooManyTokens
from gateway.intake.validator import (
    MAX_CUT_TOKENS,
    Ids,
    LongFields,
    Tokenized,
    check_detokenize,
    check_request,
    check_tokenize,
    kept_tokens,
    num_kept,
    resolve,
    too_long,
)
from gateway.long_work import Turns, let_others_run
from gateway.output.delivery import Write
from gateway.output.receipt import ReceiptWriter
from gateway.request.driver import (
    OnAdmitted,
    RequestDeps,
    RequestDriver,
    resumed_outputs_of,
    starting_specs_of,
)
from gateway.routing.dispatcher import Ask
from gateway.routing.fleet import Fleet, Worker
from gateway.telemetry.recorder import GatewayRecorder, RequestRecord

#: Assumed maximum length in tokens until a worker reports one.
_UNKNOWN_LEN = 2**20

_SUFFIX_BYTES = 6

#: Bytes of text that usually make a token, for prompts that were not tokenized yet.
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Options of one served model.

    model_name, aliases: names by which requests select the model.
    request_timeout_s: for requests without a deadline.
    has_api_keys: whether callers authenticate; then each key is an account, otherwise each
    cache_salt.
    sampling_defaults: the model's own, by option.
    max_logprobs, slo_classes: see ModelFacts.
    slo_class_of: class of an account's requests that name none, or empty.
    """

    model_name: str
    request_timeout_s: float
    has_api_keys: bool = False
    aliases: tuple[str, ...] = ()
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    max_logprobs: int = MAX_LOGPROBS
    slo_classes: Mapping[str, Slo] = field(default_factory=dict)
    slo_class_of: Mapping[bytes, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """Transport side of a request.

    metadata: headers, names in lower case.
    timeout_s: seconds until the client gives up; None if not given.
    on_admitted: awaited before anything is written, once the request is queued or its opening is on
    the way to a worker, so that it does not delay the first token.
    """

    metadata: Iterable[tuple[str, str | bytes]]
    write: Write
    timeout_s: float | None = None
    on_admitted: OnAdmitted | None = None


class Serving:
    """Serves one model. Belongs to one event loop."""

    def __init__(
        self,
        options: ServingOptions,
        deps: RequestDeps,
        tokenizer: Tokenizer,
        chat: ChatRenderer | None,
        grammars: GrammarCompiler,
        recorder: GatewayRecorder | None = None,
        *,
        unsorted: Fleet | None = None,
    ) -> None:
        """chat: None without a chat template.
        recorder: shared by all models, on the clock of `deps`; None to record nothing.
        unsorted: see Fleets; None if workers are listed by model."""
        self._options = options
        self._deps = deps
        self._fleet: Fleet = deps.fleet
        self._unsorted = unsorted
        self.tokenizer = tokenizer
        self._chat = chat
        self._grammars = grammars
        self._infos: tuple[WorkerInfo, ...] = ()
        """Decode worker infos from which `_known_facts` was computed."""
        self._known_facts = self._facts_by(self._infos)
        self._marked: tuple[WorkerInfo, ...] | None = None
        """Decode worker infos from which `_fingerprint` was computed."""
        self._fingerprint = ""
        self._clock = deps.clock or time.monotonic
        self._recorder = recorder or GatewayRecorder(no_telemetry(), self._clock)

    def check_room(self, request: inference_pb2.GenerateRequest, call: Call) -> None:
        """Raise Overloaded if the queue is known to be too long for a request, before anything else
        is done for it. The request need not be valid."""
        if not self.num_waiting or request.resume_from:
            return
        facts, params, account = self.facts, request.sampling, self._account_of(call)
        width = given(params, "best_of", given(params, "n", 1))
        if params.HasField("beam_search") or width > facts.max_num_seqs:
            return
        kind = request.prompt.WhichOneof("kind")
        is_ids = kind == "token_ids"
        num_bytes = 0 if is_ids else request.prompt.ByteSize()
        num_tokens = len(request.prompt.token_ids.ids) if is_ids else num_bytes // _TOKEN_BYTES
        slo_class = request.slo_class or self._options.slo_class_of.get(account, "")
        ask = Ask(
            account=account or tenant_of(request.cache_salt),
            width=max(1, width),
            num_tokens=num_tokens,
            max_tokens=given(params, "max_tokens", facts.max_model_len),
            deadline_s=self._deadline_s(call),
            slo=facts.slo_classes.get(slo_class),
        )
        request_id = unique_request_id(call.metadata)
        try:
            self._deps.dispatcher.check(request_id, ask)
        except Overloaded as error:
            error.request_id = request_id
            name = self._options.model_name
            with self._recorder.recording(call.metadata, name, is_chat=kind == "chat"):
                raise

    def _account_of(self, call: Call) -> bytes:
        """That of the API key; empty without keys."""
        return shown_digest(call.metadata) if self._options.has_api_keys else b""

    def _deadline_s(self, call: Call) -> float:
        """On the event loop's clock."""
        timeout_s = self._options.request_timeout_s if call.timeout_s is None else call.timeout_s
        return asyncio.get_running_loop().time() + timeout_s

    async def generate(self, request: inference_pb2.GenerateRequest, call: Call) -> None:
        """Stream the output of a request to `call.write`. Writes nothing if all choices ended in an
        earlier stream. Raises BatonError."""
        deadline_s = self._deadline_s(call)
        is_chat = request.prompt.WhichOneof("kind") == "chat"
        name = self._options.model_name
        with self._recorder.recording(call.metadata, name, is_chat=is_chat) as record:
            request_id = unique_request_id(call.metadata)
            validated = await self._validated_by(deadline_s, request, call, request_id, record)
            record.spec = validated.spec
            deps = self._deps
            outputs = await resumed_outputs_of(validated, deps.decodings)
            await deps.dispatcher.prepare(starting_specs_of(validated))
            write = call.write
            if request.return_receipt:
                write = ReceiptWriter(
                    *(write, request, validated, record.timeline, self._infos_by_name)
                )
            driver = RequestDriver(deps, validated, outputs, write, deadline_s, record.timeline)
            await driver.run(call.on_admitted)

    async def _validated_by(
        self,
        deadline_s: float,
        request: inference_pb2.GenerateRequest,
        call: Call,
        request_id: str,
        record: RequestRecord,
    ) -> ValidatedRequest:
        """Apart from `generate`, where the scope, which has the task, would be in a cycle with the
        task's error."""
        scope = asyncio.timeout_at(deadline_s)
        try:
            async with scope:
                return await self._validated(request, call, request_id, record)
        except BatonError as error:
            error.request_id = request_id
            raise
        except TimeoutError:
            if not scope.expired():
                raise
            text = "the request's time was over before its prompt was tokenized"
            raise DeadlineExceeded(text, request_id=request_id) from None

    def _infos_by_name(self) -> Mapping[str, WorkerInfo]:
        infos = (worker.info for worker in self._fleet.workers.values())
        return {info.identity.worker_id: info for info in infos if info}

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> tuple[int, ...]:
        """Tokenize a prompt exactly as `generate` does."""
        facts, prompt = self.facts, request.prompt
        keep_last = min(prompt.keep_last, facts.max_prompt_tokens) or None
        _cut_given_ids(prompt, keep_last)
        read = await check_tokenize(request, facts)
        return read.prompt.token_ids or await self._tokenize(prompt, read, facts, keep_last)

    async def detokenize(self, request: inference_pb2.DetokenizeRequest) -> str:
        """Decode token ids to text."""
        ids = await check_detokenize(request, self.facts)
        return await self.tokenizer.decode_all(ids, request.skip_special_tokens)

    def model(self, name: str = "") -> inference_pb2.Model:
        """Describe the model, or the adapter `name`, with its workers."""
        facts = self.facts
        is_adapter = name in facts.adapters
        return inference_pb2.Model(
            name=name if is_adapter else facts.name,
            parent=facts.name if is_adapter else "",
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            has_chat_template=facts.has_chat_template,
            sampling_defaults=sampling_pb2.SamplingParams(**facts.sampling_defaults),
            workers=[_status_of(worker) for worker in self._workers()],
        )

    def _workers(self) -> Iterator[Worker]:
        """Workers of this model, and workers not reached yet, which may serve it."""
        yield from self._fleet.workers.values()
        if self._unsorted is not None:
            yield from self._unsorted.workers.values()

    @property
    def request_timeout_s(self) -> float:
        """Deadline of requests without one."""
        return self._options.request_timeout_s

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._deps.dispatcher.num_waiting

    @property
    def is_reached(self) -> bool:
        """Whether a decode worker has reported its adapters."""
        return bool(self._fleet.known(Tier.DECODE))

    @property
    def facts(self) -> ModelFacts:
        """Facts against which requests are validated now."""
        infos = self._fleet.known(Tier.DECODE)
        if infos is not self._infos:
            self._infos, self._known_facts = infos, self._facts_by(infos)
        return self._known_facts

    async def _validated(
        self,
        request: inference_pb2.GenerateRequest,
        call: Call,
        request_id: str,
        record: RequestRecord,
    ) -> ValidatedRequest:
        facts, params = self.facts, request.sampling
        keep_last = num_kept(request, facts)
        _cut_given_ids(request.prompt, keep_last)
        read = await check_request(request, facts)
        started_s = self._clock()
        prompt_token_ids = read.prompt.token_ids
        if not prompt_token_ids:
            prompt_token_ids = await self._tokenize(request.prompt, read, facts, keep_last)
        await let_others_run(len(prompt_token_ids))
        words = params.bad_words
        bad_words = await self.tokenizer.encode_word_variants(words) if words else ()
        record.timeline.tokenize_ms = (self._clock() - started_s) * 1e3
        grammar = b""
        if params.HasField("structured_output"):
            output = params.structured_output
            if output.HasField("free_text"):
                output = self._with_free_text_of(output, prompt_token_ids)
            grammar = await self._grammars.compile(output)
        account = self._account_of(call)
        ids = Ids(
            request_id,
            secrets.randbits(64),
            record.arrival_ns,
            *trace_of(record.span.get_span_context()),
            account,
            self._options.slo_class_of.get(account, ""),
        )
        echo_text = await self._echo_text(request, read, prompt_token_ids) if params.echo else None
        tokenized = Tokenized(prompt_token_ids, bad_words, grammar, echo_text)
        validated = resolve(request, tokenized, facts, ids, read)
        await let_others_run(max(len(prompt_token_ids), read.num_tokens))
        return validated

    def _with_free_text_of(
        self, output: sampling_pb2.StructuredOutput, prompt_token_ids: Sequence[int]
    ) -> sampling_pb2.StructuredOutput:
        """The structured output adjusted to the prompt's end, which may have opened or closed the
        free-text part."""
        free, bytes_of = output.free_text, self.tokenizer.bytes_of
        if free.end and ends_with(bytes_of, prompt_token_ids, free.end):
            of_prompt = sampling_pb2.FreeText(instead=free.instead)
        elif free.begin and ends_with(bytes_of, prompt_token_ids, free.begin):
            of_prompt = sampling_pb2.FreeText()
            of_prompt.CopyFrom(free)
            of_prompt.has_begun = True
        else:
            return output
        made = sampling_pb2.StructuredOutput()
        made.CopyFrom(output)
        made.free_text.CopyFrom(of_prompt)
        return made

    async def _echo_text(
        self,
        request: inference_pb2.GenerateRequest,
        read: LongFields,
        prompt_token_ids: tuple[int, ...],
    ) -> str:
        """The prompt's text: as given, or decoded from its tokens."""
        if request.prompt.WhichOneof("kind") == "text" and not request.prompt.HasField("keep_last"):
            return read.text
        skips = given(request.sampling, "skip_special_tokens", True)
        return await self.tokenizer.decode_all(prompt_token_ids, skips)

    async def _tokenize(
        self,
        prompt: inference_pb2.Prompt,
        read: LongFields,
        facts: ModelFacts,
        keep_last: int | None,
    ) -> tuple[int, ...]:
        """keep_last: see Prompt; None keeps all."""
        kind = prompt.WhichOneof("kind")
        match kind:
            case "text":
                text = read.text
            case "chat" if self._chat is not None:
                roles = (message.role for message in prompt.chat.messages)
                messages = [*zip(roles, read.contents, strict=True)]
                text = await self._chat.render(messages, more_of(prompt.chat))
            case _:
                raise AssertionError(f"a prompt of {kind} was not refused")
        # A chat template has written the special tokens already.
        is_chat = kind == "chat"
        is_bare = prompt.chat.add_special_tokens if is_chat else not prompt.omit_special_tokens
        most = facts.max_prompt_tokens if keep_last is None else MAX_CUT_TOKENS
        try:
            ids = await self.tokenizer.encode(text, add_special_tokens=is_bare, max_tokens=most)
            return ids if keep_last is None else ids[kept_tokens(prompt, keep_last)]
        except TooManyTokens as error:
            raise too_long(error.num_tokens, facts) from None

    @property
    def fingerprint(self) -> str:
        """Fingerprint of what determines the tokens of a seed: the model and its workers' numerics
        classes."""
        infos = self._fleet.known(Tier.DECODE)
        if infos is not self._marked:
            numerics = sorted({str(info.numerics) for info in infos})
            text = "\n".join((__version__, self._options.model_name, *numerics))
            self._marked = infos
            self._fingerprint = f"fp_{hashlib.blake2b(text.encode(), digest_size=5).hexdigest()}"
        return self._fingerprint

    def _facts_by(self, infos: Sequence[WorkerInfo]) -> ModelFacts:
        """Facts from the decode workers' infos; from the model's files before any worker was
        reached."""
        files = self.tokenizer.facts
        fallback = files.max_model_len or _UNKNOWN_LEN
        vocab_size = infos[0].vocab_size if infos else self.tokenizer.vocab_size
        return ModelFacts(
            name=self._options.model_name,
            vocab_size=vocab_size,
            max_model_len=max((i.max_model_len for i in infos), default=fallback),
            max_kv_tokens=max(
                (i.num_blocks * i.layout.block_size for i in infos), default=fallback
            ),
            # The tokenizer may define an id that the model cannot produce.
            eos_token_ids=frozenset(t for t in files.eos_token_ids if t < vocab_size),
            has_chat_template=self._chat is not None,
            aliases=self._options.aliases,
            adapters=_adapters_of(infos, {self._options.model_name, *self._options.aliases}),
            max_num_seqs=max((i.max_num_seqs for i in infos), default=MAX_CHOICES),
            max_token_chars=self.tokenizer.max_token_chars,
            sampling_defaults=self._options.sampling_defaults,
            max_logprobs=self._options.max_logprobs,
            slo_classes=self._options.slo_classes,
        )


def _adapters_of(infos: Sequence[WorkerInfo], taken: Collection[str]) -> tuple[str, ...]:
    """Adapters that all workers have, except names of the model itself."""
    if not infos:
        return ()
    common = set(infos[0].adapters).intersection(*(info.adapters for info in infos[1:]))
    return tuple(name for name in infos[0].adapters if name in common and name not in taken)


def unique_request_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the caller's x-request-id if it is valid, else a fresh id, with a suffix that makes it
    unique.

    Unique ids keep requests of one name apart in queues, caches and tickets.
    """
    return f"{given_request_id(metadata) or 'req'}-{secrets.token_hex(_SUFFIX_BYTES)}"


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
        num_leased_window_slots=load.window_slots.leased,
        num_window_slots=load.window_slots.total,
        kv_tiers=map(tier_load_to_proto, load.kv_tiers),
    )


_MAX_NAME_CHARS = 40


def _cut_given_ids(prompt: inference_pb2.Prompt, keep_last: int | None) -> None:
    """Cut a prompt of token ids. keep_last: see Prompt; None keeps all."""
    if keep_last is not None and prompt.WhichOneof("kind") == "token_ids":
        prompt.token_ids.ids[:] = prompt.token_ids.ids[kept_tokens(prompt, keep_last)]


class Models:
    """Served models in command-line order; their names are disjoint. Belongs to one event loop."""

    def __init__(self, servings: Sequence[Serving], recorder: GatewayRecorder) -> None:
        self._servings = tuple(servings)
        self.turns = Turns()
        """Turns of new requests of both doors."""
        self._recorder = recorder
        self._by_name = {name: serving for serving in servings for name in serving.facts.names}
        """By model name and alias. Adapters are absent, since workers report them."""

    def __iter__(self) -> Iterator[Serving]:
        return iter(self._servings)

    def of(self, name: str) -> Serving:
        """Return the model with that name or adapter; for an empty name, the only model.

        Raises ModelNotFound, naming the served models; InvalidRequest for an empty name with
        several models; NoWorkers if the name may be an adapter of workers not reached yet.
        """
        serving = self._by_name.get(name)
        if serving is None and len(self._servings) == 1 and not name:
            serving = self._servings[0]
        if serving is None:
            serving = next((s for s in self._servings if name in s.facts.adapters), None)
        if serving is None:
            error = self._refusal(name)
            self._recorder.refuse(error.reason)
            raise error
        return serving

    def _refusal(self, name: str) -> BatonError:
        listed = ", ".join(repr(serving.facts.name) for serving in self._servings)
        adapters = [repr(adapter) for s in self._servings for adapter in s.facts.adapters]
        also = f", with adapters {', '.join(adapters)}" if adapters else ""
        if not name:
            return InvalidRequest.of(
                FieldViolation("model", f'"": several are served; name one of {listed}{also}')
            )
        unreached = [repr(s.facts.name) for s in self._servings if not s.is_reached]
        if unreached:
            return NoWorkers(
                f"model {shown(name)} is none of {listed}{also}; whether it is an adapter is not "
                f"known before a decode worker of {', '.join(unreached)} was reached",
                tier="decode",
            )
        is_one = len(self._servings) == 1
        here = f"the model is {listed}, and an empty name means the same" if is_one else listed
        return ModelNotFound(
            f"model {shown(name)} is not served here; {here if is_one else f'there are {here}'}"
            f"{also}",
            model=name[:_MAX_NAME_CHARS],
        )
