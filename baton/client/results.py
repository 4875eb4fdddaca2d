"""What the SDK returns, immutable values with nothing of protobuf in them; and how they are read
from the messages that arrive. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from baton.errors import BatonError
from baton.sampling_params import SamplingParams
from baton.types import UNKNOWN_NUMERICS, FinishReason, NumericsClass, TokenLogprobs
from baton.v1 import inference_pb2, sampling_pb2


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; completion_tokens is over all choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV the prefill worker had cached."""
    decode_cached_tokens: int = 0
    """Prompt tokens whose KV the decode worker already held, so that they were not sent."""
    draft_tokens: int = 0
    """Tokens that speculation proposed, over all choices."""
    accepted_tokens: int = 0
    """How many of them the model confirmed."""


@dataclass(frozen=True, slots=True)
class TimeToFirstToken:
    """What the time to the first token was spent on; see baton.v1.TimeToFirstToken. The parts add
    up to it."""

    tokenize_ms: float = 0.0
    queue_ms: float = 0.0
    reserve_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_exposed_ms: float = 0.0
    first_step_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of a request went; see baton.v1.RequestTiming."""

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
    """One piece of a stream. Pieces of one choice follow each other without gap or overlap."""

    token_index: int
    """Index in the choice's output of the first of token_ids."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """The text that these tokens complete."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token, if asked for."""
    finish_reason: FinishReason | None = None
    """Set in a choice's last piece."""
    stop: str | int | None = None
    """The stop string or stop token id that ended the choice; None if the end-of-sequence token or
    a limit did."""
    usage: Usage | None = None
    """Set in the stream's last piece."""
    timing: Timing | None = None
    """Set in the stream's last piece."""
    choice: int = 0
    request_id: str = ""
    score: float | None = None
    """Set in a choice's last piece: a beam's score, or with best_of the mean log probability that
    chose it."""
    prompt_token_ids: tuple[int, ...] = ()
    """With echo, in each choice's first piece, whose text begins with the prompt's."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """If asked for, in the first piece of choice 0: one entry per token of the prompt but the
    first."""


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
    """A whole answer. The shortcuts are of its first choice, the only one unless n > 1."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timing: Timing
    prompt_token_ids: tuple[int, ...] = ()
    """With echo."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """If asked for, one entry per token of the prompt but the first."""

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
    """A prompt's token ids, and how many tokens, prompt and output together, the model takes."""

    token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the gateway sees it; see baton.v1.WorkerStatus."""

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


@dataclass(frozen=True, slots=True)
class Model:
    """A model served, and the workers that serve it."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    workers: tuple[WorkerStatus, ...]
    sampling_defaults: SamplingParams = field(default_factory=SamplingParams)
    """What requests get that leave it out, by the model's generation_config.json."""
    parent: str = ""
    """Of a LoRA adapter, the name of the model that it is for; empty for the model itself."""


_T = TypeVar("_T", Usage, TimeToFirstToken, Timing, WorkerStatus)


def chunk_of(response: inference_pb2.GenerateResponse) -> Chunk:
    """Raises BatonError for a finish reason that this version does not know."""
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
        choice=response.choice,
        request_id=response.request_id,
        score=response.score if response.HasField("score") else None,
        prompt_token_ids=tuple(response.prompt_token_ids),
        prompt_logprobs=tuple(map(_logprobs, response.prompt_logprobs)),
    )


def _logprobs(message: sampling_pb2.PositionLogprobs) -> TokenLogprobs:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprobs(message.chosen.token_id, message.chosen.logprob, top)


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
    """Of options that are numbers."""
    values: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    # float32 on the wire: 0.7, not 0.699999988.
    rounded = {k: float(f"{v:.7g}") for k, v in values.items() if isinstance(v, float)}
    return SamplingParams(**{**values, **rounded})


def _worker_status(message: inference_pb2.WorkerStatus) -> WorkerStatus:
    found = message.numerics
    numerics = NumericsClass(found.device, found.level, found.dtype, found.kernels)
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


def _same_fields(cls: type[_T], message: Any) -> _T:
    """A dataclass from the message whose fields have the same names."""
    return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})
