"""Validation rules for the parts of a request: model facts, limits and error texts. Pure.

baton.sampling_params has the limits of each sampling option, and whether a beam search allows it.
Rules here depend on the model or on other fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeVar

from google.protobuf.message import Message

from baton.errors import FieldViolation
from baton.sampling_params import (
    ALL_LOGPROBS,
    LENGTH_PENALTY,
    MAX_BEAM_WIDTH,
    MAX_CHOICES,
    MAX_LOGPROBS,
    OPTIONS,
    Limits,
    Range,
    Texts,
    TokenBiases,
    TokenIds,
)
from baton.types import BeamParams, EarlyStopping, Sampling, Slo
from baton.v1 import inference_pb2, sampling_pb2

#: Maximum violations reported per repeated field.
MAX_SHOWN = 4

_MAX_SHOWN_CHARS = 40

Violations = Iterator[FieldViolation]
#: Yields the violations of one option.
Rule = Callable[[sampling_pb2.SamplingParams, "ModelFacts"], Violations]
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of the model that requests are checked against.

    max_kv_tokens: KV capacity of the largest decode worker, in tokens. max_num_seqs: largest batch
    of any decode worker, in sequences. max_token_chars: length of the tokenizer's longest token.
    aliases: further names. adapters: LoRA adapters that all workers have. sampling_defaults: the
    model's own, by option. max_logprobs: maximum alternatives per position; -1 for the whole
    vocabulary. slo_classes: targets of each class of requests.
    """

    name: str
    vocab_size: int
    max_model_len: int
    max_kv_tokens: int
    eos_token_ids: frozenset[int]
    has_chat_template: bool
    max_num_seqs: int
    max_token_chars: int
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    max_logprobs: int = MAX_LOGPROBS
    slo_classes: Mapping[str, Slo] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model, without adapters."""
        return (self.name, *self.aliases)

    @property
    def max_prompt_tokens(self) -> int:
        """Leaves room for one output token."""
        return min(self.max_model_len, self.max_kv_tokens) - 1


def limit_violations(field: str, value: Any, limits: Limits, vocab_size: int) -> Violations:
    """Violations of an option's limits."""
    match limits:
        case Range():
            if not limits.holds(value):
                yield FieldViolation(field, f"{value:g}: must be {limits}")
        case Texts():
            yield from text_violations(field, value, limits)
        case TokenIds():
            if len(value) > limits.max_num:
                # Bounds the cost of checking.
                yield FieldViolation(field, f"{len(value)} ids: give at most {limits.max_num}")
                return
            yield from id_violations(field, value, vocab_size)
        case TokenBiases():
            if len(value) > limits.max_num:
                yield FieldViolation(field, f"{len(value)} entries: give at most {limits.max_num}")
                return
            yield from id_violations(field, sorted(value), vocab_size, is_map=True)
            wrong = [(k, bias) for k, bias in value.items() if not limits.bias.holds(bias)]
            for token_id, bias in sorted(wrong)[:MAX_SHOWN]:
                yield FieldViolation(f"{field}[{token_id}]", f"{bias:g}: must be {limits.bias}")


def id_violations(
    field: str, token_ids: Sequence[int], vocab_size: int, *, is_map: bool = False, first: int = 0
) -> Violations:
    """Token ids outside the vocabulary. is_map: the ids are keys of a map. first: index of the
    first id in the field."""
    if not token_ids or max(token_ids) < vocab_size:
        return
    wrong = ((i, t) for i, t in enumerate(token_ids, first) if t >= vocab_size)
    for index, token_id in islice(wrong, MAX_SHOWN):
        yield FieldViolation(
            f"{field}[{token_id if is_map else index}]",
            f"token id {token_id}: out of vocabulary; must be below its size, {vocab_size}",
        )


def text_violations(field: str, texts: Sequence[str], limits: Texts) -> Violations:
    """Too many texts, and empty or overlong ones."""
    max_chars = limits.max_chars
    if len(texts) > limits.max_num:
        yield FieldViolation(field, f"{len(texts)} {limits.unit}: give at most {limits.max_num}")
        return
    wrong = [(i, text) for i, text in enumerate(texts) if not 1 <= len(text) <= max_chars]
    for index, text in wrong[:MAX_SHOWN]:
        yield FieldViolation(
            f"{field}[{index}]", f"{len(text)} characters: must have 1 to {max_chars}"
        )


def given(message: Message, field: str, default: ValueT) -> ValueT:
    """The value of an optional field, or the default."""
    value: ValueT = getattr(message, field)
    return value if message.HasField(field) else default


def shown(text: str) -> str:
    """A client's text for an error message: quoted and shortened."""
    return repr(text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}...")


#: Maximum log probabilities of a prompt, over all positions; one message carries them.
MAX_PROMPT_LOGPROBS = 2**20

_PATH = "sampling"
_STRUCTURED = f"{_PATH}.structured_output"

#: Maximum characters of a structured output by kind, summed over choices: bounds a worker's compile
#: time and memory.
MAX_STRUCTURED_CHARS = MappingProxyType(
    {"json_schema": 65_536, "regex": 8_192, "choice": 65_536, "grammar": 65_536}
)
_CHOICE_TEXTS = Texts(1024, 1024, "texts")
#: Maximum characters of a free-text mark.
_MAX_MARK_CHARS = 1024
_MAX_THINKING_TOKENS = 2**20
_MARKS = Texts(130, _MAX_MARK_CHARS, "marks")

#: Options that depend on the model or prompt, or that the tiers get in another form.
_RESOLVED = frozenset(
    {"logit_bias", "max_tokens", "stop_token_ids", "seed", "bad_words", "logprobs"}
    | {"prompt_logprobs", "allowed_token_ids", "logprob_token_ids"}
)
#: Options that the tiers get unchanged, with defaults where Sampling has none.
_PLAIN = OPTIONS.keys() & Sampling.__dataclass_fields__.keys() - _RESOLVED
_DEFAULTS: Mapping[str, Any] = {
    name: OPTIONS[name].default for name in _PLAIN if OPTIONS[name].default is not None
}

#: For each word of SamplingParams.bad_words: its spellings, as token ids.
BadWordIds = tuple[tuple[tuple[int, ...], ...], ...]


def sampling_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    """Violations of sampling parameters, except those that depend on the prompt's length or on the
    tokens of bad words."""
    is_beam_search = params.HasField("beam_search")
    # Visits only the options that are set.
    for descriptor, value in params.ListFields():
        option, path = OPTIONS[descriptor.name], f"{_PATH}.{descriptor.name}"
        rule = _RULES.get(descriptor.name)
        if rule is not None:
            yield from rule(params, facts)
        elif option.limits is not None:
            yield from limit_violations(path, value, option.limits, facts.vocab_size)
        if is_beam_search and not option.with_beams:
            yield FieldViolation(path, "has no meaning in a beam search; leave out one of them")


def prompt_logprobs_violations(
    params: sampling_pb2.SamplingParams, num_prompt_tokens: int, facts: ModelFacts
) -> Violations:
    """Prompt log probabilities beyond what one message carries."""
    count = num_prompt_tokens * (_num_logprobs(params, "prompt_logprobs", facts) + 1)
    if count > MAX_PROMPT_LOGPROBS:
        yield FieldViolation(
            f"{_PATH}.prompt_logprobs",
            f"{params.prompt_logprobs}: with {num_prompt_tokens} tokens of prompt more than "
            f"{MAX_PROMPT_LOGPROBS} in all; ask for fewer, or shorten the prompt",
        )


def bad_word_violations(
    params: sampling_pb2.SamplingParams, bad_words: BadWordIds, facts: ModelFacts
) -> Violations:
    """Words without tokens, and words that consist of an end token, which other fields forbid."""
    stops = _stop_token_ids(params, facts)
    wrong = []
    for index, (word, written) in enumerate(zip(params.bad_words, bad_words, strict=True)):
        if not all(written):
            wrong.append((index, f"{word!r}: no token comes of it; leave it out"))
        elif any(len(ids) == 1 and ids[0] in stops for ids in written):
            wrong.append(
                (index, f"{word!r}: is an end token; set ignore_eos or min_tokens instead")
            )
    for index, text in wrong[:MAX_SHOWN]:
        yield FieldViolation(f"{_PATH}.bad_words[{index}]", text)


def sampling_of(
    params: sampling_pb2.SamplingParams,
    num_prompt_tokens: int,
    facts: ModelFacts,
    seed: int,
    bad_words: BadWordIds,
    grammar: bytes,
) -> Sampling:
    """Sampling parameters for the tiers. seed: for requests without one. grammar: of
    structured_output, or empty."""
    beam = _beam_params(params) if params.HasField("beam_search") else None
    plain = {f.name: value for f, value in params.ListFields() if f.name in _PLAIN}
    defaults = facts.sampling_defaults
    if beam:
        chosen = {**_DEFAULTS, **plain, "temperature": 0.0}
    else:
        of_model = {name: value for name, value in defaults.items() if name in _PLAIN}
        chosen = {**_DEFAULTS, **of_model, **plain}
    room = facts.max_model_len - num_prompt_tokens
    # max_tokens if not given: the model's default, at least min_tokens.
    unasked = max(params.min_tokens, min(room, defaults.get("max_tokens", room)))
    # Distinct spellings, without those that need tokens which the model lacks.
    ways = dict.fromkeys(ids for written in bad_words for ids in written)
    return Sampling(
        **chosen,
        logprobs=_num_logprobs(params, "logprobs", facts),
        prompt_logprobs=_num_logprobs(params, "prompt_logprobs", facts),
        allowed_token_ids=tuple(params.allowed_token_ids),
        logprob_token_ids=tuple(dict.fromkeys(params.logprob_token_ids)),
        logit_bias=MappingProxyType(dict(params.logit_bias)),
        max_tokens=given(params, "max_tokens", unasked),
        stop_token_ids=_stop_token_ids(params, facts),
        seed=given(params, "seed", seed),
        bad_words=tuple(ids for ids in ways if max(ids) < facts.vocab_size),
        grammar=grammar,
        beam=beam,
    )


def _stop_token_ids(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> frozenset[int]:
    eos = frozenset[int]() if params.ignore_eos else facts.eos_token_ids
    return eos.union(params.stop_token_ids)


def _num_logprobs(params: sampling_pb2.SamplingParams, field: str, facts: ModelFacts) -> int:
    """As Sampling has it: -1 for none, at most the vocabulary."""
    num: int | None = given(params, field, None)
    return -1 if num is None else min(num, facts.vocab_size)


def _beam_params(params: sampling_pb2.SamplingParams) -> BeamParams:
    beam = params.beam_search
    return BeamParams(
        width=beam.width,
        length_penalty=given(beam, "length_penalty", 1.0),
        early_stopping=EarlyStopping(beam.early_stopping),
        num_returned=given(params, "n", 1),
    )


def _n_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    most = min(MAX_CHOICES, facts.max_num_seqs)
    if not 1 <= params.n <= most:
        yield FieldViolation(f"{_PATH}.n", f"{params.n}: must be 1 to {_most_at_once(most)}")


def _best_of_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    most = min(MAX_CHOICES, facts.max_num_seqs)
    n = given(params, "n", 1)
    if not n <= params.best_of <= most:
        yield FieldViolation(
            f"{_PATH}.best_of", f"{params.best_of}: must be n, {n}, to {_most_at_once(most)}"
        )


def _logprobs_violations(field: str) -> Rule:
    """The rule of logprobs or prompt_logprobs."""

    def rule(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
        asked, most = getattr(params, field), facts.max_logprobs
        if most == -1 or (asked == ALL_LOGPROBS and most >= facts.vocab_size):
            return
        if asked > most:
            shown = "-1" if asked == ALL_LOGPROBS else str(asked)
            fault = f"{shown}: must be 0 or more, and at most {most}; see --max-logprobs"
            yield FieldViolation(f"{_PATH}.{field}", fault)

    return rule


def _logprob_ids_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    path, limits = f"{_PATH}.logprob_token_ids", OPTIONS["logprob_token_ids"].limits
    if not params.HasField("logprobs"):
        yield FieldViolation(path, f"{len(params.logprob_token_ids)} ids: goes with logprobs")
    if limits is not None:
        yield from limit_violations(path, params.logprob_token_ids, limits, facts.vocab_size)


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


def _beam_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    path, beam = f"{_PATH}.beam_search", params.beam_search
    most = min(MAX_BEAM_WIDTH, facts.max_num_seqs)
    if not 1 <= beam.width <= most:
        shown = str(most) if most == MAX_BEAM_WIDTH else _most_at_once(most)
        yield FieldViolation(f"{path}.width", f"{beam.width}: must be 1 to {shown}")
    elif given(params, "n", 1) > beam.width:
        yield FieldViolation(
            f"{_PATH}.n", f"{params.n}: must be at most beam_search.width, {beam.width}"
        )
    if beam.HasField("length_penalty"):
        yield from limit_violations(
            f"{path}.length_penalty", beam.length_penalty, LENGTH_PENALTY, facts.vocab_size
        )
    if beam.early_stopping not in sampling_pb2.EarlyStopping.values():
        yield FieldViolation(
            f"{path}.early_stopping", f"{beam.early_stopping}: must be one of EarlyStopping"
        )


def _structured_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    """Violations of structured_output, and of options that conflict with it."""
    yield from _structure_violations(params.structured_output)
    if params.ignore_eos:
        yield FieldViolation(
            f"{_PATH}.ignore_eos", "true: a structured output ends by an end token; leave it unset"
        )
    elif not facts.eos_token_ids and not params.stop_token_ids:
        yield FieldViolation(
            f"{_PATH}.stop_token_ids",
            "[]: this model has no end token, by which a structured output could end; give one",
        )
    if params.min_tokens:
        yield FieldViolation(
            f"{_PATH}.min_tokens",
            f"{params.min_tokens}: a structured output that is complete can only end; leave it "
            "unset, and ask for a longer one in structured_output",
        )


def _structure_violations(output: sampling_pb2.StructuredOutput) -> Violations:
    if output.HasField("free_text"):
        yield from _free_text_violations(output.free_text)
    kind = output.WhichOneof("kind")
    match kind:
        case None:
            yield FieldViolation(
                _STRUCTURED, "unset; give one of json_schema, json_object, regex, choice or grammar"
            )
        case "json_object":
            if not output.json_object:
                yield FieldViolation(
                    f"{_STRUCTURED}.{kind}", "false: set it to true, or leave it out"
                )
        case "choice":
            yield from _choice_violations(output.choice.values)
        case _:
            num_chars = len(getattr(output, kind))
            if not 1 <= num_chars <= MAX_STRUCTURED_CHARS[kind]:
                yield FieldViolation(
                    f"{_STRUCTURED}.{kind}",
                    f"{num_chars} characters: must have 1 to {MAX_STRUCTURED_CHARS[kind]}",
                )


def _free_text_violations(free: sampling_pb2.FreeText) -> Violations:
    field = f"{_STRUCTURED}.free_text"
    for name in ("begin", "end"):
        num_chars = len(getattr(free, name))
        if num_chars > _MAX_MARK_CHARS:
            fault = f"{num_chars} characters: give at most {_MAX_MARK_CHARS}"
            yield FieldViolation(f"{field}.{name}", fault)
    if not free.end:
        for name in ("begin", "has_begun", "may_be_all"):
            if getattr(free, name):
                yield FieldViolation(f"{field}.{name}", "goes with end; give the mark that ends it")
    elif not (free.begin or free.has_begun):
        yield FieldViolation(f"{field}.begin", "unset: give it, or has_begun, since end is given")
    yield from text_violations(f"{field}.instead", free.instead, _MARKS)
    if free.max_tokens > _MAX_THINKING_TOKENS:
        fault = f"{free.max_tokens}: give at most {_MAX_THINKING_TOKENS}"
        yield FieldViolation(f"{field}.max_tokens", fault)


def _choice_violations(texts: Sequence[str]) -> Violations:
    field = f"{_STRUCTURED}.choice.values"
    if not texts:
        yield FieldViolation(field, "[]: empty; give at least one text")
    yield from text_violations(field, texts, _CHOICE_TEXTS)
    num_chars = sum(map(len, texts))
    if num_chars > MAX_STRUCTURED_CHARS["choice"]:
        yield FieldViolation(
            field, f"{num_chars} characters in all: give at most {MAX_STRUCTURED_CHARS['choice']}"
        )


#: Rules by option, beyond the table's limits.
_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "n": _n_violations,
        "best_of": _best_of_violations,
        "max_tokens": _length_violations,
        "logprobs": _logprobs_violations("logprobs"),
        "prompt_logprobs": _logprobs_violations("prompt_logprobs"),
        "logprob_token_ids": _logprob_ids_violations,
        "beam_search": _beam_violations,
        "structured_output": _structured_violations,
    }
)


MAX_TOOLS = 128
MAX_TOOL_CHARS = 65_536
MAX_TOOLS_CHARS = 524_288
MAX_KWARGS_CHARS = 65_536
#: Summed over all messages.
MAX_TOOL_CALLS = 1024

_CHAT = "prompt.chat"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

#: Variables that the renderer sets.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def tool_violations(chat: inference_pb2.ChatPrompt) -> Violations:
    """Violations of tools, their calls, and template variables."""
    if chat.tools:
        yield from _tools_violations(chat)
    num_calls = sum(len(message.tool_calls) for message in chat.messages)
    if num_calls > MAX_TOOL_CALLS:
        fault = f"{num_calls} calls of tools; give at most {MAX_TOOL_CALLS}"
        yield FieldViolation(f"{_CHAT}.messages", fault)
        return
    for index, message in enumerate(chat.messages):
        for number, call in enumerate(message.tool_calls):
            if not _is_object(call.arguments):
                yield FieldViolation(
                    f"{_CHAT}.messages[{index}].tool_calls[{number}].arguments",
                    f"{shown(call.arguments)}: must be a JSON object",
                )
                return
    if chat.template_kwargs:
        yield from _kwargs_violations(chat.template_kwargs)
    if chat.continue_final_message and chat.add_generation_prompt:
        yield FieldViolation(
            f"{_CHAT}.add_generation_prompt",
            "true: with continue_final_message nothing begins anew; leave out one of them",
        )


def _tools_violations(chat: inference_pb2.ChatPrompt) -> Violations:
    field, tools = f"{_CHAT}.tools", chat.tools
    num_chars = sum(len(tool.description) + len(tool.parameters) for tool in tools)
    if len(tools) > MAX_TOOLS or num_chars > MAX_TOOLS_CHARS:
        yield FieldViolation(
            field,
            f"{len(tools)} tools of {num_chars} characters: give at most {MAX_TOOLS}, of "
            f"{MAX_TOOLS_CHARS} characters in all",
        )
        return
    wrong = []
    for index, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name):
            fault = f'{shown(tool.name)}: must have 1 to 64 of letters, digits, "_", "-" and "."'
            wrong.append(FieldViolation(f"{field}[{index}].name", fault))
        elif len(tool.parameters) > MAX_TOOL_CHARS:
            fault = f"{len(tool.parameters)} characters: give at most {MAX_TOOL_CHARS}"
            wrong.append(FieldViolation(f"{field}[{index}].parameters", fault))
        elif tool.parameters and not _is_object(tool.parameters):
            fault = f"{shown(tool.parameters)}: must be a JSON Schema, an object"
            wrong.append(FieldViolation(f"{field}[{index}].parameters", fault))
    yield from wrong[:MAX_SHOWN]


def _kwargs_violations(text: str) -> Violations:
    field = f"{_CHAT}.template_kwargs"
    if len(text) > MAX_KWARGS_CHARS:
        yield FieldViolation(field, f"{len(text)} characters: give at most {MAX_KWARGS_CHARS}")
        return
    if not _is_object(text):
        yield FieldViolation(field, f"{shown(text)}: must be a JSON object")
        return
    taken = sorted(_RESERVED & json.loads(text).keys())
    if taken:
        yield FieldViolation(f"{field}.{taken[0]}", "is not a variable of the template's own")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
