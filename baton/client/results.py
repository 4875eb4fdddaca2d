"""Result types of the SDK, immutable and free of protobuf, and their construction from messages.
Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict

from baton.errors import BatonError
from baton.sampling_params import SamplingParams
from baton.types import (
    UNKNOWN_NUMERICS,
    FinishReason,
    NumericsClass,
    TierLoad,
    TokenLogprobs,
)
from baton.v1 import inference_pb2, sampling_pb2


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; completion_tokens is summed over choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens cached by the prefill worker."""
    decode_cached_tokens: int = 0
    """Prompt tokens cached by the decode worker, and therefore not transferred."""
    draft_tokens: int = 0
    """Draft tokens of speculative decoding, summed over choices."""
    accepted_tokens: int = 0
    """Draft tokens accepted by the model."""


@dataclass(frozen=True, slots=True)
class TimeToFirstToken:
    """Parts of the time to first token, which they sum to; see baton.v1.TimeToFirstToken."""

    tokenize_ms: float = 0.0
    queue_ms: float = 0.0
    reserve_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_exposed_ms: float = 0.0
    first_step_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Timing of a request; see baton.v1.RequestTiming."""

    tokenize_ms: float = 0.0
    queue_ms: float = 0.0
    reserve_ms: float = 0.0
    prefill_queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_exposed_ms: float = 0.0
    time_to_first_token_ms: float = 0.0
    decode_ms: float = 0.0
    total_ms: float = 0.0
    transfer_bytes: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    num_resumes: int = 0
    first_token: TimeToFirstToken = TimeToFirstToken()


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a stream. Pieces of a choice are contiguous."""

    token_index: int
    """Index of token_ids[0] in the choice's output."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Text completed by these tokens."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token, if requested."""
    finish_reason: FinishReason | None = None
    """Set in a choice's last piece."""
    stop: str | int | None = None
    """The stop string or stop token id that ended the choice; None for the end-of-sequence token or
    a limit."""
    usage: Usage | None = None
    """Set in the stream's last piece."""
    timing: Timing | None = None
    """Set in the stream's last piece."""
    choice: int = 0
    request_id: str = ""
    score: float | None = None
    """Set in a choice's last piece: a beam's score, or with best_of its mean log probability."""
    prompt_token_ids: tuple[int, ...] = ()
    """With echo, set in each choice's first piece; its text then begins with the prompt's."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """If requested, in the first piece of choice 0: one entry per prompt token after the first."""
    receipt: Mapping[str, Any] | None = None
    """If requested, in the stream's last piece: baton.v1.Receipt as JSON, as in the HTTP API."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole output; fields as in Chunk."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop: str | int | None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. The shortcuts refer to its first choice, the only one unless n > 1."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timing: Timing
    prompt_token_ids: tuple[int, ...] = ()
    """With echo."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """If requested, one entry per prompt token after the first."""
    receipt: Mapping[str, Any] | None = None
    """If requested; see Chunk."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Token ids of a prompt, and the model's maximum length in tokens, prompt and output."""

    token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as seen by the gateway; see baton.v1.WorkerStatus."""

    worker_id: str
    address: str
    tier: str
    state: str
    reason: str
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_leased_blocks: int
    num_blocks: int
    block_size: int
    num_in_flight: int
    local_prefill_threshold: int = 0
    numerics: NumericsClass = UNKNOWN_NUMERICS
    num_leased_window_slots: int = 0
    num_window_slots: int = 0
    kv_tiers: tuple[TierLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """A served model and its workers."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    workers: tuple[WorkerStatus, ...]
    sampling_defaults: SamplingParams = field(default_factory=SamplingParams)
    """Defaults from the model's generation_config.json."""
    parent: str = ""
    """Base model of a LoRA adapter; empty for a model itself."""


_T = TypeVar("_T", Usage, TimeToFirstToken, Timing, WorkerStatus, TierLoad)


def _json_of(receipt: inference_pb2.Receipt) -> Mapping[str, Any]:
    return MessageToDict(receipt, preserving_proto_field_name=True)


def chunk_of(response: inference_pb2.GenerateResponse) -> Chunk:
    """Convert a piece. Raises BatonError for a finish reason that this version does not know."""
    try:
        finish = FinishReason(response.finish_reason)
    except ValueError:
        raise BatonError(
            f"finish reason {response.finish_reason} is not known here; upgrade this client"
        ) from None
    stop_kind = response.stop_cause.WhichOneof("kind")
    timing = None
    if response.HasField("timing"):
        first_token = _same_fields(TimeToFirstToken, response.timing.first_token)
        timing = replace(_same_fields(Timing, response.timing), first_token=first_token)
    return Chunk(
        token_index=response.token_index,
        token_ids=tuple(response.token_ids),
        text=response.text,
        logprobs=tuple(map(_logprobs, response.logprobs)),
        finish_reason=finish or None,
        stop=getattr(response.stop_cause, stop_kind) if stop_kind else None,
        usage=_same_fields(Usage, response.usage) if response.HasField("usage") else None,
        timing=timing,
        receipt=_json_of(response.receipt) if response.HasField("receipt") else None,
        choice=response.choice,
        request_id=response.request_id,
        score=response.score if response.HasField("score") else None,
        prompt_token_ids=tuple(response.prompt_token_ids),
        prompt_logprobs=tuple(map(_logprobs, response.prompt_logprobs)),
    )


def _logprobs(message: sampling_pb2.PositionLogprobs) -> TokenLogprobs:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprobs(message.chosen.token_id, message.chosen.logprob, top, message.rank)


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
        sampling_defaults=_sampling_of(model.sampling_defaults),
        parent=model.parent,
    )


def _sampling_of(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Numeric sampling options."""
    values: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    # float32 on the wire: 0.7, not 0.699999988.
    rounded = {k: float(f"{v:.7g}") for k, v in values.items() if isinstance(v, float)}
    return SamplingParams(**{**values, **rounded})


def _worker_status(message: inference_pb2.WorkerStatus) -> WorkerStatus:
    found = message.numerics
    numerics = NumericsClass(found.device, found.level, found.dtype, found.kernels)
    tiers = tuple(_same_fields(TierLoad, tier) for tier in message.kv_tiers)
    return replace(_same_fields(WorkerStatus, message), numerics=numerics, kv_tiers=tiers)


@dataclass(slots=True)
class _Output:
    """Accumulated output of a choice."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    score: float | None = None


def completion_of(request_id: str, chunks: Iterable[Chunk]) -> Completion:
    """Join all pieces of an ended stream."""
    outputs: dict[int, _Output] = {}
    usage, timing = Usage(), Timing()
    receipt: Mapping[str, Any] | None = None
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
        receipt = chunk.receipt or receipt
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
    return Completion(
        request_id, choices, usage, timing, prompt_token_ids, prompt_logprobs, receipt
    )


def _same_fields(cls: type[_T], message: Any) -> _T:
    """Build a dataclass from a message with the same field names."""
    return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})
