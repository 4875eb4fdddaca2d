"""The rules of SamplingParams, and what parameters that keep to them mean. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from baton.errors import FieldViolation
from baton.types import BeamParams, EarlyStopping, Sampling
from baton.v1 import sampling_pb2
from gateway.intake.model_facts import ModelFacts
from gateway.intake.structured_rules import structured_violations
from gateway.intake.violations import (
    MAX_TOLD,
    Range,
    Violations,
    by_field,
    given,
    id_violations,
    is_given,
    range_violations,
    text_violations,
)

MAX_CHOICES = 128
MAX_BEAM_WIDTH = 64
MAX_LOGIT_BIAS = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
#: Log probabilities of a prompt, over all its positions: one message carries them all.
MAX_PROMPT_LOGPROBS = 2**20

_PATH = "sampling"

_RANGES = by_field(
    Range("temperature", 0, 100),
    Range("top_p", 0, 1, is_open=True),
    Range("min_p", 0, 1),
    Range("repetition_penalty", 0, 100, is_open=True),
    Range("presence_penalty", -2, 2),
    Range("frequency_penalty", -2, 2),
    Range("logprobs", 0, MAX_LOGPROBS),
    Range("prompt_logprobs", 0, MAX_LOGPROBS),
)
_BIAS = Range("logit_bias", -100, 100)
_BEAM_RANGES = by_field(Range("length_penalty", -10, 10))

#: Optional and repeated fields that choose otherwise than a beam search does.
_NOT_WITH_BEAMS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
    "include_stop_str_in_output",
    "best_of",
    "prompt_logprobs",
)
_LISTS_NOT_WITH_BEAMS = ("logit_bias", "stop", "bad_words")

#: Where a request's words become token ids: those of each word of SamplingParams.bad_words, in each
#: way it is written.
BadWordIds = tuple[tuple[tuple[int, ...], ...], ...]


def sampling_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    """What is wrong with parameters, but for what depends on the prompt's length and on how bad
    words are written."""
    yield from range_violations(params, _RANGES, _PATH)
    for field, _ in params.ListFields():
        rule = _RULES.get(field.name)
        if rule is not None:
            yield from rule(params, facts)


def prompt_logprobs_violations(
    params: sampling_pb2.SamplingParams, num_prompt_tokens: int
) -> Violations:
    """Log probabilities of more of the prompt than one message carries."""
    count = num_prompt_tokens * (params.prompt_logprobs + 1)
    if params.HasField("prompt_logprobs") and count > MAX_PROMPT_LOGPROBS:
        yield FieldViolation(
            f"{_PATH}.prompt_logprobs",
            f"{params.prompt_logprobs}: with {num_prompt_tokens} tokens of prompt more than "
            f"{MAX_PROMPT_LOGPROBS} in all; ask for fewer, or shorten the prompt",
        )


def bad_word_violations(
    params: sampling_pb2.SamplingParams, bad_words: BadWordIds, facts: ModelFacts
) -> Violations:
    """Words without tokens, and words that are nothing but an end token, which other fields
    forbid."""
    stops = _stop_token_ids(params, facts)
    wrong = []
    for index, (word, written) in enumerate(zip(params.bad_words, bad_words, strict=True)):
        if not all(written):
            wrong.append((index, f"{word!r}: no token comes of it; leave it out"))
        elif any(len(ids) == 1 and ids[0] in stops for ids in written):
            wrong.append(
                (index, f"{word!r}: is an end token; set ignore_eos or min_tokens instead")
            )
    for index, text in wrong[:MAX_TOLD]:
        yield FieldViolation(f"{_PATH}.bad_words[{index}]", text)


def num_returned(params: sampling_pb2.SamplingParams) -> int:
    """Outputs that the client gets."""
    return given(params, "n", 1)


def num_choices(params: sampling_pb2.SamplingParams) -> int:
    """Choices that the tiers produce; the outputs of a beam search are its choices."""
    return given(params, "best_of", num_returned(params))


def sampling_of(
    params: sampling_pb2.SamplingParams,
    num_prompt_tokens: int,
    facts: ModelFacts,
    seed: int,
    bad_words: BadWordIds,
    grammar: bytes,
) -> Sampling:
    """What the tiers are told. seed: for requests that give none. grammar: that of
    structured_output, or empty."""
    beam = _beam_params(params)
    return Sampling(
        temperature=0.0 if beam else given(params, "temperature", 1.0),
        top_k=params.top_k,
        top_p=given(params, "top_p", 1.0),
        min_p=params.min_p,
        repetition_penalty=given(params, "repetition_penalty", 1.0),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=MappingProxyType(dict(params.logit_bias)),
        min_tokens=params.min_tokens,
        max_tokens=given(params, "max_tokens", facts.max_model_len - num_prompt_tokens),
        stop_token_ids=_stop_token_ids(params, facts),
        seed=given(params, "seed", seed),
        logprobs=given(params, "logprobs", -1),
        bad_words=_possible(bad_words, facts.vocab_size),
        prompt_logprobs=given(params, "prompt_logprobs", -1),
        grammar=grammar,
        beam=beam,
    )


def _stop_token_ids(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> frozenset[int]:
    eos = frozenset[int]() if params.ignore_eos else facts.eos_token_ids
    return eos.union(params.stop_token_ids)


def _possible(bad_words: BadWordIds, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Each way of writing a word once, without those that need tokens which the model lacks."""
    ways = dict.fromkeys(ids for written in bad_words for ids in written)
    return tuple(ids for ids in ways if max(ids) < vocab_size)


def _beam_params(params: sampling_pb2.SamplingParams) -> BeamParams | None:
    if not params.HasField("beam_search"):
        return None
    beam = params.beam_search
    return BeamParams(
        width=beam.width,
        length_penalty=given(beam, "length_penalty", 1.0),
        early_stopping=EarlyStopping(beam.early_stopping),
        num_returned=num_returned(params),
    )


def _n_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    most = min(MAX_CHOICES, facts.max_num_seqs)
    if not 1 <= params.n <= most:
        yield FieldViolation(f"{_PATH}.n", f"{params.n}: must be 1 to {_most_at_once(most)}")


def _best_of_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    most = min(MAX_CHOICES, facts.max_num_seqs)
    n = num_returned(params)
    if not n <= params.best_of <= most:
        yield FieldViolation(
            f"{_PATH}.best_of",
            f"{params.best_of}: must be n, {n}, to {_most_at_once(most)}",
        )


def _most_at_once(most: int) -> str:
    return str(most) if most == MAX_CHOICES else f"{most}, which the decode workers run at once"


def _length_violations(
    params: sampling_pb2.SamplingParams,
    facts: ModelFacts,  # noqa: ARG001, the signature of a rule
) -> Violations:
    if params.max_tokens < 1:
        yield FieldViolation(f"{_PATH}.max_tokens", "0: must be at least 1, or unset")
    elif params.min_tokens > params.max_tokens:
        yield FieldViolation(
            f"{_PATH}.min_tokens",
            f"{params.min_tokens}: must be at most max_tokens, {params.max_tokens}",
        )


def _bias_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    field = f"{_PATH}.logit_bias"
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        yield FieldViolation(
            field, f"{len(params.logit_bias)} entries: give at most {MAX_LOGIT_BIAS}"
        )
    yield from id_violations(field, sorted(params.logit_bias), facts.vocab_size, is_map=True)
    wrong = [(k, v) for k, v in params.logit_bias.items() if not _BIAS.holds(v)]
    for token_id, value in sorted(wrong)[:MAX_TOLD]:
        yield FieldViolation(f"{field}[{token_id}]", f"{value:g}: must be {_BIAS}")


def _stop_violations(
    params: sampling_pb2.SamplingParams,
    facts: ModelFacts,  # noqa: ARG001
) -> Violations:
    return text_violations(f"{_PATH}.stop", params.stop, MAX_STOPS, MAX_STOP_CHARS, "strings")


def _word_violations(
    params: sampling_pb2.SamplingParams,
    facts: ModelFacts,  # noqa: ARG001
) -> Violations:
    words = params.bad_words
    return text_violations(f"{_PATH}.bad_words", words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS, "words")


def _stop_token_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    field = f"{_PATH}.stop_token_ids"
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield FieldViolation(
            field, f"{len(params.stop_token_ids)} ids: give at most {MAX_STOP_TOKEN_IDS}"
        )
    yield from id_violations(field, params.stop_token_ids, facts.vocab_size)


def _beam_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    path, beam = f"{_PATH}.beam_search", params.beam_search
    most = min(MAX_BEAM_WIDTH, facts.max_num_seqs)
    if not 1 <= beam.width <= most:
        told = str(most) if most == MAX_BEAM_WIDTH else _most_at_once(most)
        yield FieldViolation(f"{path}.width", f"{beam.width}: must be 1 to {told}")
    elif num_returned(params) > beam.width:
        yield FieldViolation(
            f"{_PATH}.n", f"{params.n}: must be at most beam_search.width, {beam.width}"
        )
    yield from range_violations(beam, _BEAM_RANGES, path)
    if beam.early_stopping not in sampling_pb2.EarlyStopping.values():
        yield FieldViolation(
            f"{path}.early_stopping", f"{beam.early_stopping}: must be one of EarlyStopping"
        )
    fields = [name for name in _NOT_WITH_BEAMS if is_given(params, name)]
    fields += [name for name in _LISTS_NOT_WITH_BEAMS if getattr(params, name)]
    for name in fields:
        yield FieldViolation(
            f"{_PATH}.{name}", "has no meaning in a beam search; leave it unset, or beam_search"
        )


#: By field: what it breaks when it is given. Most are not, and cost nothing then.
_RULES: Mapping[str, Callable[[sampling_pb2.SamplingParams, ModelFacts], Violations]] = (
    MappingProxyType(
        {
            "n": _n_violations,
            "best_of": _best_of_violations,
            "max_tokens": _length_violations,
            "logit_bias": _bias_violations,
            "stop": _stop_violations,
            "stop_token_ids": _stop_token_violations,
            "bad_words": _word_violations,
            "beam_search": _beam_violations,
            "structured_output": structured_violations,
        }
    )
)
