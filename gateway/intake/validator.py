"""The one validator: every field of a request is checked here, and nowhere else. Pure.

All violations of a request come in one error, each with the field's path, its value, and the fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import BatonError, FieldViolation, InvalidRequest
from baton.types import SequenceSpec, tenant_of
from baton.v1 import inference_pb2, sampling_pb2
from gateway.intake.request import ChoiceSoFar, TextOptions, ValidatedRequest
from gateway.intake.sampling_rules import (
    BadWordIds,
    bad_word_violations,
    prompt_logprobs_violations,
    sampling_of,
    sampling_violations,
)
from gateway.intake.tool_rules import tool_violations
from gateway.intake.violations import MAX_SHOWN, ModelFacts, Violations, given, id_violations, shown

MAX_PRIORITY = 1000
MAX_SALT_CHARS = 256
MAX_MESSAGES = 1024
MAX_ROLE_CHARS = 64


@dataclass(frozen=True, slots=True)
class Ids:
    """What is drawn or counted for a request, and not part of it. traceparent, tracestate: of its
    span; may be empty. account: of its API key; empty if there is none."""

    request_id: str
    seed: int
    arrival_ns: int
    traceparent: str = ""
    tracestate: str = ""
    account: bytes = b""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A request's texts as the tiers read them. bad_words: one entry per word of
    sampling.bad_words.

    grammar: that of sampling.structured_output, or empty. echo_text: the prompt's text, if the
    outputs are to begin with it.
    """

    prompt_token_ids: tuple[int, ...]
    bad_words: BadWordIds = ()
    grammar: bytes = b""
    echo_text: str | None = None


def check_request(
    request: inference_pb2.GenerateRequest,
    facts: ModelFacts,
    given_ids: Sequence[int] | None = None,
) -> None:
    """Check all that needs no tokenizer; where the prompt is token ids, its length too. given_ids:
    those ids, if they have been read out of the message.

    Raises InvalidRequest with all violations.
    """
    violations = [
        *_prompt_violations(request.prompt, facts, given_ids),
        *sampling_violations(request.sampling, facts),
    ]
    if abs(request.priority) > MAX_PRIORITY:
        text = f"{request.priority}: must be from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        violations.append(FieldViolation("priority", text))
    if len(salt := request.cache_salt) > MAX_SALT_CHARS:
        text = f"{shown(salt)}, {len(salt)} characters: give at most {MAX_SALT_CHARS}"
        violations.append(FieldViolation("cache_salt", text))
    if request.resume_from:
        violations += _resume_violations(request, facts)
    num_tokens = len(request.prompt.token_ids.ids)
    if 0 < num_tokens <= facts.max_prompt_tokens:
        violations += _output_violations(num_tokens, request.sampling, facts)
    if violations:
        raise InvalidRequest.of(*violations)


def check_tokenize(
    request: inference_pb2.TokenizeRequest,
    facts: ModelFacts,
    given_ids: Sequence[int] | None = None,
) -> None:
    """As check_request, for a prompt alone."""
    if violations := tuple(_prompt_violations(request.prompt, facts, given_ids)):
        raise InvalidRequest.of(*violations)


def check_detokenize(
    request: inference_pb2.DetokenizeRequest,
    facts: ModelFacts,
    given_ids: Sequence[int] | None = None,
) -> None:
    """As check_request, for token ids alone."""
    num_tokens = len(request.token_ids)
    if num_tokens > facts.max_model_len:
        text = f"{num_tokens} ids: the model takes {facts.max_model_len}; ask for fewer at a time"
        raise InvalidRequest.of(FieldViolation("token_ids", text))
    token_ids = request.token_ids if given_ids is None else given_ids
    if violations := tuple(id_violations("token_ids", token_ids, facts.vocab_size)):
        raise InvalidRequest.of(*violations)


def too_long(num_prompt_tokens: int, facts: ModelFacts) -> BatonError:
    """Of a prompt of more tokens than facts.max_prompt_tokens."""
    return InvalidRequest.of(_too_long_violation(num_prompt_tokens, facts))


def resolve(
    request: inference_pb2.GenerateRequest, tokenized: Tokenized, facts: ModelFacts, ids: Ids
) -> ValidatedRequest:
    """What a checked request, now tokenized, means. Raises InvalidRequest if its tokens, lengths or
    words do not fit."""
    params, num_returned = request.sampling, given(request.sampling, "n", 1)
    num_prompt_tokens = len(tokenized.prompt_token_ids)
    if not num_prompt_tokens:
        raise InvalidRequest.of(FieldViolation("prompt", "no token comes of it; give some text"))
    if num_prompt_tokens > facts.max_prompt_tokens:
        raise too_long(num_prompt_tokens, facts)
    violations: list[FieldViolation] = []
    if params.bad_words:
        violations += bad_word_violations(params, tokenized.bad_words, facts)
    if request.prompt.WhichOneof("kind") != "token_ids":  # those were checked before
        if max(tokenized.prompt_token_ids) >= facts.vocab_size:
            violations.append(_foreign_token_violation(tokenized.prompt_token_ids, facts))
        violations += _output_violations(num_prompt_tokens, params, facts)
    if violations:
        raise InvalidRequest.of(*violations)
    spec = SequenceSpec(
        request_id=ids.request_id,
        prompt_token_ids=tokenized.prompt_token_ids,
        sampling=sampling_of(
            params,
            num_prompt_tokens,
            facts,
            ids.seed,
            bad_words=tokenized.bad_words,
            grammar=tokenized.grammar,
        ),
        tenant=tenant_of(request.cache_salt),
        priority=request.priority,
        arrival_ns=ids.arrival_ns,
        traceparent=ids.traceparent,
        tracestate=ids.tracestate,
        num_choices=given(params, "best_of", num_returned),
        adapter=request.model if request.model in facts.adapters else "",
    )
    if request.resume_from and (violations := [*_finished_violations(request, spec, facts)]):
        raise InvalidRequest.of(*violations)
    text = TextOptions(
        stop=tuple(params.stop),
        is_stop_included=params.include_stop_str_in_output,
        skip_special_tokens=given(params, "skip_special_tokens", True),
        user_stop_token_ids=frozenset(params.stop_token_ids),
    )
    resume_from = {
        entry.choice: ChoiceSoFar(tuple(entry.token_ids), entry.num_chars, entry.has_ended)
        for entry in request.resume_from
    }
    account = ids.account or spec.tenant
    return ValidatedRequest(spec, text, num_returned, tokenized.echo_text, account, resume_from)


def _prompt_violations(
    prompt: inference_pb2.Prompt, facts: ModelFacts, given_ids: Sequence[int] | None
) -> Violations:
    """What is wrong with a prompt, but for the tokens of a text. What is too long is not looked
    at."""
    match prompt.WhichOneof("kind"):
        case "text":
            num_chars = len(prompt.text)  # each look at it is a copy
            if not num_chars:
                yield FieldViolation("prompt.text", '"": empty; give at least one character')
            yield from _char_violations("prompt.text", num_chars, facts)
        case "token_ids":
            ids = prompt.token_ids.ids
            if not ids:
                yield FieldViolation("prompt.token_ids", "[]: empty; give at least one token id")
            if len(ids) > facts.max_prompt_tokens:
                yield _too_long_violation(len(ids), facts)
            else:
                read = ids if given_ids is None else given_ids
                yield from id_violations("prompt.token_ids.ids", read, facts.vocab_size)
        case "chat":
            yield from _chat_violations(prompt.chat, facts)
        case _:
            yield FieldViolation("prompt", "unset; give one of text, token_ids or chat")


def _foreign_token_violation(token_ids: Sequence[int], facts: ModelFacts) -> FieldViolation:
    """Tokens that the tokenizer has and the model has not: added ones, if the model was not resized
    for them."""
    foreign = [token_id for token_id in token_ids if token_id >= facts.vocab_size]
    return FieldViolation(
        "prompt",
        f"{len(foreign)} of its tokens, {foreign[0]} the first, are beyond the model's "
        f"vocabulary of {facts.vocab_size}; leave out the special tokens of other models",
    )


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
        return
    num_chars = sum(
        len(message.content) + sum(len(call.arguments) for call in message.tool_calls)
        for message in chat.messages
    )
    # Apart: templates leave most of it out.
    num_thought_chars = sum(len(message.reasoning_content) for message in chat.messages)
    yield from _char_violations("prompt.chat.messages", max(num_chars, num_thought_chars), facts)
    long = [i for i, message in enumerate(chat.messages) if len(message.role) > MAX_ROLE_CHARS]
    for index in long[:MAX_SHOWN]:
        yield FieldViolation(
            f"prompt.chat.messages[{index}].role",
            f"{shown(chat.messages[index].role)}: give at most {MAX_ROLE_CHARS} characters",
        )
    nameless = [i for i, message in enumerate(chat.messages) if not message.role]
    for index in nameless[:MAX_SHOWN]:
        yield FieldViolation(
            f"prompt.chat.messages[{index}].role", '"": empty; say who speaks, e.g. "user"'
        )
    yield from tool_violations(chat, facts)


def _resume_violations(request: inference_pb2.GenerateRequest, facts: ModelFacts) -> Violations:
    entries, params = request.resume_from, request.sampling
    n = given(params, "n", 1)
    if params.HasField("beam_search") or given(params, "best_of", n) != n:
        yield FieldViolation(
            "resume_from",
            "given with a beam search or best_of, which send nothing before their end; leave it "
            "out",
        )
        return
    if len({entry.choice for entry in entries}) < len(entries):
        yield FieldViolation("resume_from", "a choice is given twice; give each once")
        return
    if not params.HasField("seed"):
        yield FieldViolation(
            "sampling.seed", "unset: an answer goes on with the seed that it began with; give it"
        )
    for index, entry in enumerate(entries[: n + MAX_SHOWN]):
        field = f"resume_from[{index}]"
        if entry.choice >= n:
            yield FieldViolation(f"{field}.choice", f"{entry.choice}: must be below n, {n}")
        if not (entry.token_ids or entry.has_ended):
            yield FieldViolation(
                f"{field}.token_ids", "[]: empty; leave out a choice that nothing came of"
            )
        if len(entry.token_ids) > facts.max_model_len:
            yield FieldViolation(
                f"{field}.token_ids",
                f"{len(entry.token_ids)} ids: the model takes {facts.max_model_len}",
            )
        else:
            yield from id_violations(f"{field}.token_ids", entry.token_ids, facts.vocab_size)


def _finished_violations(
    request: inference_pb2.GenerateRequest, spec: SequenceSpec, facts: ModelFacts
) -> Violations:
    """Choices that have all their tokens, and yet have not ended."""
    room = min(spec.sampling.max_tokens, facts.max_model_len - len(spec.prompt_token_ids))
    for index, entry in enumerate(request.resume_from):
        if len(entry.token_ids) >= room and not entry.has_ended:
            yield FieldViolation(
                f"resume_from[{index}].token_ids",
                f"{len(entry.token_ids)} ids: the output has {room} at most, and would have ended; "
                "set has_ended",
            )


def _char_violations(field: str, num_chars: int, facts: ModelFacts) -> Violations:
    # A longer text is not looked at: it would have too many tokens, unless the tokenizer leaves
    # most of it out.
    if num_chars > facts.max_prompt_tokens * facts.max_token_chars:
        yield FieldViolation(
            field,
            f"{num_chars} characters: a prompt has at most {facts.max_prompt_tokens} tokens here, "
            f"none of more than {facts.max_token_chars} characters; shorten it",
        )


def _too_long_violation(num_prompt_tokens: int, facts: ModelFacts) -> FieldViolation:
    if num_prompt_tokens > facts.max_model_len - 1:
        return FieldViolation(
            "prompt",
            f"{num_prompt_tokens} tokens: the model takes {facts.max_model_len} with at least one "
            f"of output; shorten the prompt to {facts.max_model_len - 1}",
        )
    return FieldViolation(
        "prompt",
        f"{num_prompt_tokens} tokens: the largest decode worker's KV memory holds "
        f"{facts.max_kv_tokens}; shorten the prompt to {facts.max_prompt_tokens}",
    )


def _output_violations(
    num_prompt_tokens: int, params: sampling_pb2.SamplingParams, facts: ModelFacts
) -> Violations:
    """What does not fit beside a prompt that fits."""
    if params.HasField("prompt_logprobs"):
        yield from prompt_logprobs_violations(params, num_prompt_tokens)
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
