"""The one validator: every field of a request is checked here, and nowhere else. Pure.

All violations of a request come in one error, each with the field's path, its value, and the fix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from baton.errors import FieldViolation, InvalidRequest, ModelNotFound
from baton.types import Sampling, SequenceSpec, tenant_of
from baton.v1 import inference_pb2, sampling_pb2
from gateway.request import TextOptions

MAX_CHOICES = 128
MAX_LOGIT_BIAS = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_PRIORITY = 1000
MAX_SALT_CHARS = 256
MAX_MESSAGES = 1024

_MAX_SHOWN_CHARS = 40
#: Violations of one repeated field that are told one by one.
_MAX_TOLD = 4

Violations = Iterator[FieldViolation]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What requests are checked against. max_kv_tokens: tokens that the largest decode worker's memory holds."""

    name: str
    vocab_size: int
    max_model_len: int
    max_kv_tokens: int
    eos_token_ids: frozenset[int]
    has_chat_template: bool

    @property
    def max_prompt_tokens(self) -> int:
        """One token of output must fit, too."""
        return min(self.max_model_len, self.max_kv_tokens) - 1


@dataclass(frozen=True, slots=True)
class Ids:
    """What is drawn or counted for a request, and not told by it."""

    request_id: str
    seed: int
    arrival_ns: int


@dataclass(frozen=True, slots=True)
class _Range:
    """low <= value <= high, without low itself if `is_open`."""

    field: str
    low: float
    high: float
    is_open: bool = False

    def holds(self, value: float) -> bool:
        is_above = value > self.low if self.is_open else value >= self.low
        return is_above and value <= self.high  # both false for NaN

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.is_open else f"{self.low:g} or more"
        return f"{low}, and at most {self.high:g}"


_RANGES = (
    _Range("temperature", 0, 100),
    _Range("top_p", 0, 1, is_open=True),
    _Range("min_p", 0, 1),
    _Range("repetition_penalty", 0, 100, is_open=True),
    _Range("presence_penalty", -2, 2),
    _Range("frequency_penalty", -2, 2),
)
_BIAS = _Range("logit_bias", -100, 100)


def check_model(name: str, facts: ModelFacts) -> None:
    """Raises ModelNotFound unless `name` is the model's, or empty."""
    if name and name != facts.name:
        raise ModelNotFound(
            f"model {_shown(name)} is not served here; the model is {facts.name!r}, "
            "and an empty name means the same",
            model=name[:_MAX_SHOWN_CHARS],
        )


def check_request(request: inference_pb2.GenerateRequest, facts: ModelFacts) -> None:
    """Check all that needs no tokenizer; where the prompt is token ids, its length too.

    Raises ModelNotFound, or InvalidRequest with all violations.
    """
    check_model(request.model, facts)
    violations = [
        *_prompt_violations(request.prompt, facts),
        *_sampling_violations(request.sampling, facts),
        *_other_violations(request),
    ]
    if request.prompt.WhichOneof("kind") == "token_ids" and request.prompt.token_ids.ids:
        num_tokens = len(request.prompt.token_ids.ids)
        violations += _length_violations(num_tokens, request.sampling, facts)
    if violations:
        raise InvalidRequest.of(*violations)


def check_tokenize(request: inference_pb2.TokenizeRequest, facts: ModelFacts) -> None:
    """As check_request, for a prompt alone."""
    check_model(request.model, facts)
    if violations := tuple(_prompt_violations(request.prompt, facts)):
        raise InvalidRequest.of(*violations)


def check_detokenize(request: inference_pb2.DetokenizeRequest, facts: ModelFacts) -> None:
    """As check_request, for token ids alone."""
    check_model(request.model, facts)
    if violations := tuple(_id_violations("token_ids", request.token_ids, facts)):
        raise InvalidRequest.of(*violations)


def resolve(
    request: inference_pb2.GenerateRequest,
    prompt_token_ids: tuple[int, ...],
    facts: ModelFacts,
    ids: Ids,
) -> tuple[SequenceSpec, TextOptions]:
    """What a checked request, now tokenized, means. Raises InvalidRequest if its lengths do not fit."""
    params = request.sampling
    if not prompt_token_ids:
        raise InvalidRequest.of(FieldViolation("prompt", "no token comes of it; give some text"))
    violations = [*_length_violations(len(prompt_token_ids), params, facts)]
    if violations:
        raise InvalidRequest.of(*violations)
    user_stops = frozenset(params.stop_token_ids)
    spec = SequenceSpec(
        request_id=ids.request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=_sampling(params, len(prompt_token_ids), facts, ids.seed),
        tenant=tenant_of(request.cache_salt),
        priority=request.priority,
        arrival_ns=ids.arrival_ns,
    )
    text = TextOptions(
        stop=tuple(params.stop),
        is_stop_included=params.include_stop_str_in_output,
        skip_special_tokens=_given(params, "skip_special_tokens", True),
        user_stop_token_ids=user_stops,
    )
    return spec, text


def _prompt_violations(prompt: inference_pb2.Prompt, facts: ModelFacts) -> Violations:
    """What is wrong with a prompt, its length in tokens apart."""
    match prompt.WhichOneof("kind"):
        case "text":
            if not prompt.text:
                yield FieldViolation("prompt.text", '"": empty; give at least one character')
        case "token_ids":
            if not prompt.token_ids.ids:
                yield FieldViolation("prompt.token_ids", "[]: empty; give at least one token id")
            yield from _id_violations("prompt.token_ids.ids", prompt.token_ids.ids, facts)
        case "chat":
            yield from _chat_violations(prompt.chat, facts)
        case _:
            yield FieldViolation("prompt", "unset; give one of text, token_ids or chat")


def _chat_violations(chat: inference_pb2.ChatPrompt, facts: ModelFacts) -> Violations:
    if not facts.has_chat_template:
        yield FieldViolation(
            "prompt.chat", "this model has no chat template; give prompt.text instead"
        )
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        yield FieldViolation(
            "prompt.chat.messages",
            f"{len(chat.messages)} messages; give at least 1 and at most {MAX_MESSAGES}",
        )
    nameless = [i for i, message in enumerate(chat.messages) if not message.role]
    for index in nameless[:_MAX_TOLD]:
        yield FieldViolation(
            f"prompt.chat.messages[{index}].role", '"": empty; say who speaks, e.g. "user"'
        )


def _sampling_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    if params.HasField("n") and params.n != 1:
        fix = "only one choice per request is served by this version"
        is_in_range = 1 <= params.n <= MAX_CHOICES
        yield FieldViolation("sampling.n", f"{params.n}: {fix if is_in_range else 'must be 1'}")
    for limits in _RANGES:
        value = getattr(params, limits.field)
        if _is_given(params, limits.field) and not limits.holds(value):
            yield FieldViolation(f"sampling.{limits.field}", f"{value:g}: must be {limits}")
    if params.HasField("max_tokens") and params.max_tokens < 1:
        yield FieldViolation("sampling.max_tokens", "0: must be at least 1, or unset")
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens >= 1:
        yield FieldViolation(
            "sampling.min_tokens",
            f"{params.min_tokens}: must be at most max_tokens, {params.max_tokens}",
        )
    if params.HasField("logprobs") and params.logprobs > MAX_LOGPROBS:
        yield FieldViolation(
            "sampling.logprobs", f"{params.logprobs}: must be at most {MAX_LOGPROBS}"
        )
    yield from _bias_violations(params, facts)
    yield from _stop_violations(params, facts)


def _bias_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    field = "sampling.logit_bias"
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        yield FieldViolation(
            field, f"{len(params.logit_bias)} entries: give at most {MAX_LOGIT_BIAS}"
        )
    yield from _id_violations(field, sorted(params.logit_bias), facts, is_map=True)
    wrong = [(k, v) for k, v in params.logit_bias.items() if not _BIAS.holds(v)]
    for token_id, value in sorted(wrong)[:_MAX_TOLD]:
        yield FieldViolation(f"{field}[{token_id}]", f"{value:g}: must be {_BIAS}")


def _stop_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    if len(params.stop) > MAX_STOPS:
        yield FieldViolation(
            "sampling.stop", f"{len(params.stop)} strings: give at most {MAX_STOPS}"
        )
    wrong = [(i, s) for i, s in enumerate(params.stop) if not 1 <= len(s) <= MAX_STOP_CHARS]
    for index, stop in wrong[:_MAX_TOLD]:
        yield FieldViolation(
            f"sampling.stop[{index}]",
            f"{len(stop)} characters: must have 1 to {MAX_STOP_CHARS}",
        )
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield FieldViolation(
            "sampling.stop_token_ids",
            f"{len(params.stop_token_ids)} ids: give at most {MAX_STOP_TOKEN_IDS}",
        )
    yield from _id_violations("sampling.stop_token_ids", params.stop_token_ids, facts)


def _id_violations(
    field: str, token_ids: Sequence[int], facts: ModelFacts, *, is_map: bool = False
) -> Violations:
    if not token_ids or max(token_ids) < facts.vocab_size:
        return
    wrong = [(i, t) for i, t in enumerate(token_ids) if t >= facts.vocab_size]
    for index, token_id in wrong[:_MAX_TOLD]:
        yield FieldViolation(
            f"{field}[{token_id if is_map else index}]",
            f"token id {token_id}: must be below the vocabulary's size, {facts.vocab_size}",
        )


def _other_violations(request: inference_pb2.GenerateRequest) -> Violations:
    if abs(request.priority) > MAX_PRIORITY:
        yield FieldViolation(
            "priority", f"{request.priority}: must be from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    if len(request.cache_salt) > MAX_SALT_CHARS:
        yield FieldViolation(
            "cache_salt",
            f"{_shown(request.cache_salt)}, {len(request.cache_salt)} characters: "
            f"give at most {MAX_SALT_CHARS}",
        )


def _length_violations(
    num_prompt_tokens: int, params: sampling_pb2.SamplingParams, facts: ModelFacts
) -> Violations:
    if num_prompt_tokens > facts.max_model_len - 1:
        yield FieldViolation(
            "prompt",
            f"{num_prompt_tokens} tokens: the model takes {facts.max_model_len} with at least one "
            f"of output; shorten the prompt to {facts.max_model_len - 1}",
        )
        return
    if num_prompt_tokens > facts.max_prompt_tokens:
        yield FieldViolation(
            "prompt",
            f"{num_prompt_tokens} tokens: the largest decode worker's KV memory holds "
            f"{facts.max_kv_tokens}; shorten the prompt to {facts.max_prompt_tokens}",
        )
        return
    room = facts.max_model_len - num_prompt_tokens
    if params.HasField("max_tokens"):
        if params.max_tokens > room:
            yield FieldViolation(
                "sampling.max_tokens",
                f"{params.max_tokens}: with {num_prompt_tokens} tokens of prompt more than the "
                f"model's {facts.max_model_len}; lower it to {room}, or leave it unset",
            )
    elif params.min_tokens > room:
        yield FieldViolation(
            "sampling.min_tokens",
            f"{params.min_tokens}: the prompt leaves room for {room}; lower it",
        )


def _sampling(
    params: sampling_pb2.SamplingParams, num_prompt_tokens: int, facts: ModelFacts, seed: int
) -> Sampling:
    eos = frozenset[int]() if params.ignore_eos else facts.eos_token_ids
    return Sampling(
        temperature=_given(params, "temperature", 1.0),
        top_k=params.top_k,
        top_p=_given(params, "top_p", 1.0),
        min_p=params.min_p,
        repetition_penalty=_given(params, "repetition_penalty", 1.0),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=MappingProxyType(dict(params.logit_bias)),
        min_tokens=params.min_tokens,
        max_tokens=_given(params, "max_tokens", facts.max_model_len - num_prompt_tokens),
        stop_token_ids=frozenset(params.stop_token_ids) | eos,
        seed=_given(params, "seed", seed),
        logprobs=_given(params, "logprobs", -1),
    )


ValueT = TypeVar("ValueT")


def _given(params: sampling_pb2.SamplingParams, field: str, default: ValueT) -> ValueT:
    """An optional field's value, or its default."""
    value: ValueT = getattr(params, field)
    return value if _is_given(params, field) else default


def _is_given(params: sampling_pb2.SamplingParams, field: str) -> bool:
    return params.HasField(field)  # type: ignore[arg-type] # the stubs want literal names


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}...")
