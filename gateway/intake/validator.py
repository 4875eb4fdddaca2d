"""The one validator: checks every field of a request. Pure.

All violations of a request come in one error, each with the field's path, its value and the fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.errors import BatonError, FieldViolation, InvalidRequest
from baton.types import SequenceSpec, tenant_of
from baton.v1 import inference_pb2, sampling_pb2
from gateway.intake.request import ChoiceSoFar, TextOptions, ValidatedRequest
from gateway.intake.rules import (
    MAX_SHOWN,
    BadWordIds,
    ModelFacts,
    Violations,
    bad_word_violations,
    given,
    id_violations,
    prompt_logprobs_violations,
    sampling_of,
    sampling_violations,
    shown,
    tool_violations,
)
from gateway.long_work import Pacer, in_pieces, let_others_run

#: Maximum messages of a conversation.
MAX_MESSAGES = 1024


@dataclass(frozen=True, slots=True)
class ReadIds:
    """Token ids of one field; empty if there are too many. wrong: the first ids outside the
    vocabulary."""

    token_ids: tuple[int, ...] = ()
    wrong: tuple[FieldViolation, ...] = ()


@dataclass(frozen=True, slots=True)
class LongFields:
    """Long fields of a request. prompt: its token ids. text: of a text prompt. contents: of a
    chat's messages. so_far: by entry of resume_from."""

    prompt: ReadIds = ReadIds()
    text: str = ""
    contents: tuple[str, ...] = ()
    so_far: tuple[ReadIds, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Total of all fields."""
        return sum(len(each.token_ids) for each in (self.prompt, *self.so_far))


MAX_PRIORITY = 1000
MAX_SALT_CHARS = 256

#: Longest name of a class of requests.
MAX_CLASS_CHARS = 64
MAX_ROLE_CHARS = 64

#: Token ids of earlier outputs that a request may have beyond the model's length: bounds the
#: gateway's work per request.
MAX_OTHER_IDS = 2**18


#: Maximum tokens of a text of which only the last ones are kept.
MAX_CUT_TOKENS = 2**22


def num_kept(request: inference_pb2.GenerateRequest, facts: ModelFacts) -> int | None:
    """Maximum tokens of the prompt, of which the last ones are kept: Prompt.keep_last, or less if
    max_tokens leaves less room. None keeps all, or refuses them."""
    keep_last, max_tokens = request.prompt.keep_last, request.sampling.max_tokens
    room = min(facts.max_prompt_tokens, facts.max_model_len - max_tokens)
    return min(keep_last, room) if keep_last and room > 0 else None


def kept_tokens(prompt: inference_pb2.Prompt, num: int) -> slice:
    """The prompt's tokens that are kept. num: num_kept."""
    return slice(num) if prompt.keeps_first else slice(-num, None)


@dataclass(frozen=True, slots=True)
class Ids:
    """Generated identifiers of a request. traceparent, tracestate: of its span; may be empty.
    account: of its API key; empty without keys. slo_class: of that key, or empty."""

    request_id: str
    seed: int
    arrival_ns: int
    traceparent: str = ""
    tracestate: str = ""
    account: bytes = b""
    slo_class: str = ""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A request's texts as tokens. bad_words: one entry per word of sampling.bad_words.

    grammar: of sampling.structured_output, or empty. echo_text: the prompt's text, if the outputs
    begin with it.
    """

    prompt_token_ids: tuple[int, ...]
    bad_words: BadWordIds = ()
    grammar: bytes = b""
    echo_text: str | None = None


async def check_request(request: inference_pb2.GenerateRequest, facts: ModelFacts) -> LongFields:
    """Check everything that needs no tokenizer, including the length of a token prompt. Returns the
    long fields, read in pieces.

    Raises InvalidRequest with all violations.
    """
    read = replace(
        await _read_prompt(request.prompt, facts), so_far=await _read_so_far(request, facts)
    )
    await let_others_run(read.num_tokens)
    violations = [
        *_prompt_violations(request.prompt, facts, read),
        *sampling_violations(request.sampling, facts),
    ]
    if abs(request.priority) > MAX_PRIORITY:
        text = f"{request.priority}: must be from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        violations.append(FieldViolation("priority", text))
    if len(salt := request.cache_salt) > MAX_SALT_CHARS:
        text = f"{shown(salt)}, {len(salt)} characters: give at most {MAX_SALT_CHARS}"
        violations.append(FieldViolation("cache_salt", text))
    if request.slo_class and request.slo_class not in facts.slo_classes:
        violations.append(_slo_class_violation(request.slo_class, facts))
    if request.resume_from:
        violations += _resume_violations(request, facts, read.so_far)
    num_tokens = len(request.prompt.token_ids.ids)
    if 0 < num_tokens <= facts.max_prompt_tokens:
        violations += _output_violations(num_tokens, request.sampling, facts)
    if violations:
        raise InvalidRequest.of(*violations)
    await let_others_run(read.num_tokens)
    return read


async def check_tokenize(request: inference_pb2.TokenizeRequest, facts: ModelFacts) -> LongFields:
    """As check_request, for a prompt alone."""
    read = await _read_prompt(request.prompt, facts)
    if violations := tuple(_prompt_violations(request.prompt, facts, read)):
        raise InvalidRequest.of(*violations)
    return read


async def check_detokenize(
    request: inference_pb2.DetokenizeRequest, facts: ModelFacts
) -> tuple[int, ...]:
    """As check_request, for token ids alone, which it returns."""
    num_tokens = len(request.token_ids)
    if num_tokens > facts.max_model_len:
        text = f"{num_tokens} ids: the model takes {facts.max_model_len}; ask for fewer at a time"
        raise InvalidRequest.of(FieldViolation("token_ids", text))
    read = await _read_ids("token_ids", request.token_ids, facts.max_model_len, facts)
    if read.wrong:
        raise InvalidRequest.of(*read.wrong)
    return read.token_ids


async def _read_prompt(prompt: inference_pb2.Prompt, facts: ModelFacts) -> LongFields:
    match prompt.WhichOneof("kind"):
        case "token_ids":
            ids, most = prompt.token_ids.ids, facts.max_prompt_tokens
            return LongFields(await _read_ids("prompt.token_ids.ids", ids, most, facts))
        case "text":
            text = prompt.text
            await let_others_run(len(text))
            return LongFields(text=text)
        case "chat":
            pacer = Pacer()
            contents: list[str] = []
            for message in prompt.chat.messages[:MAX_MESSAGES]:
                contents.append(message.content)
                await pacer.advance(len(contents[-1]))
            return LongFields(contents=tuple(contents))
    return LongFields()


async def _read_so_far(
    request: inference_pb2.GenerateRequest, facts: ModelFacts
) -> tuple[ReadIds, ...]:
    """Ids by entry of resume_from; left out if there are too many."""
    entries, most = request.resume_from, facts.max_model_len
    if sum(len(entry.token_ids) for entry in entries) > MAX_OTHER_IDS + most:
        return (ReadIds(),) * len(entries)
    pacer = Pacer()
    read: list[ReadIds] = []
    for index, entry in enumerate(entries):
        field = f"resume_from[{index}].token_ids"
        read.append(await _read_ids(field, entry.token_ids, most, facts))
        await pacer.advance(len(entry.token_ids))
    return tuple(read)


async def _read_ids(field: str, token_ids: Sequence[int], most: int, facts: ModelFacts) -> ReadIds:
    """Read the ids of a field. most: maximum number."""
    if len(token_ids) > most:
        return ReadIds()
    made: list[int] = []
    wrong: list[FieldViolation] = []

    def read(piece: Sequence[int]) -> None:
        if len(wrong) < MAX_SHOWN:
            wrong.extend(id_violations(field, piece, facts.vocab_size, first=len(made)))
        made.extend(piece)

    await in_pieces(token_ids, read)
    return ReadIds(tuple(made), tuple(wrong[:MAX_SHOWN]))


def too_long(num_prompt_tokens: int, facts: ModelFacts) -> BatonError:
    """Error for a prompt of more than facts.max_prompt_tokens tokens."""
    return InvalidRequest.of(_too_long_violation(num_prompt_tokens, facts))


def resolve(
    request: inference_pb2.GenerateRequest,
    tokenized: Tokenized,
    facts: ModelFacts,
    ids: Ids,
    read: LongFields,
) -> ValidatedRequest:
    """Resolve a checked and tokenized request. read: as `check_request` returned it. Raises
    InvalidRequest if its tokens, lengths or words do not fit."""
    params, num_returned = request.sampling, given(request.sampling, "n", 1)
    num_prompt_tokens = len(tokenized.prompt_token_ids)
    if not num_prompt_tokens:
        raise InvalidRequest.of(FieldViolation("prompt", "no token comes of it; give some text"))
    if num_prompt_tokens > facts.max_prompt_tokens:
        raise too_long(num_prompt_tokens, facts)
    violations: list[FieldViolation] = []
    if params.bad_words:
        violations += bad_word_violations(params, tokenized.bad_words, facts)
    if request.prompt.WhichOneof("kind") != "token_ids":  # token prompts were checked before
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
        slo=facts.slo_classes.get(request.slo_class or ids.slo_class),
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
        entry.choice: ChoiceSoFar(ids_so_far.token_ids, entry.num_chars, entry.has_ended)
        for entry, ids_so_far in zip(request.resume_from, read.so_far, strict=True)
    }
    account = ids.account or spec.tenant
    return ValidatedRequest(spec, text, num_returned, tokenized.echo_text, account, resume_from)


def _slo_class_violation(name: str, facts: ModelFacts) -> FieldViolation:
    known = facts.slo_classes
    fix = f"give one of {', '.join(known)}" if known else "this gateway has none; leave it out"
    return FieldViolation("slo_class", f"{shown(name)} is no class of requests here: {fix}")


def _prompt_violations(
    prompt: inference_pb2.Prompt, facts: ModelFacts, read: LongFields
) -> Violations:
    """Violations of a prompt, except the tokens of a text. Overlong values are not examined."""
    if prompt.HasField("keep_last") and not prompt.keep_last:
        yield FieldViolation("prompt.keep_last", "0: must be at least 1, or unset")
    match prompt.WhichOneof("kind"):
        case "text":
            num_chars = len(read.text)
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
                yield from read.prompt.wrong
        case "chat":
            yield from _chat_violations(prompt.chat, facts, read)
        case _:
            yield FieldViolation("prompt", "unset; give one of text, token_ids or chat")


def _foreign_token_violation(token_ids: Sequence[int], facts: ModelFacts) -> FieldViolation:
    """Tokens of the tokenizer that the model lacks: added tokens, if its embedding was not
    resized."""
    foreign = [token_id for token_id in token_ids if token_id >= facts.vocab_size]
    return FieldViolation(
        "prompt",
        f"{len(foreign)} of its tokens, {foreign[0]} the first, are beyond the model's "
        f"vocabulary of {facts.vocab_size}; leave out the special tokens of other models",
    )


def _chat_violations(
    chat: inference_pb2.ChatPrompt, facts: ModelFacts, read: LongFields
) -> Violations:
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
    num_chars = sum(map(len, read.contents)) + sum(
        len(call.arguments) for message in chat.messages for call in message.tool_calls
    )
    # Counted separately: templates omit most of it.
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
    yield from tool_violations(chat)


def _resume_violations(
    request: inference_pb2.GenerateRequest, facts: ModelFacts, read: Sequence[ReadIds]
) -> Violations:
    """read: ids by entry."""
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
            yield from read[index].wrong
    most, num_ids = MAX_OTHER_IDS + facts.max_model_len, sum(len(e.token_ids) for e in entries)
    if num_ids > most:
        yield FieldViolation("resume_from", f"{num_ids} token ids in all; give at most {most}")


def _finished_violations(
    request: inference_pb2.GenerateRequest, spec: SequenceSpec, facts: ModelFacts
) -> Violations:
    """Choices that reached max_tokens but have not ended."""
    room = min(spec.sampling.max_tokens, facts.max_model_len - len(spec.prompt_token_ids))
    for index, entry in enumerate(request.resume_from):
        if len(entry.token_ids) >= room and not entry.has_ended:
            yield FieldViolation(
                f"resume_from[{index}].token_ids",
                f"{len(entry.token_ids)} ids: the output has {room} at most, and would have ended; "
                "set has_ended",
            )


def _char_violations(field: str, num_chars: int, facts: ModelFacts) -> Violations:
    # Longer texts are not examined: they would exceed the token limit, unless the tokenizer drops
    # most of the text.
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
    """Options that do not fit with a prompt of valid length."""
    if params.HasField("prompt_logprobs"):
        yield from prompt_logprobs_violations(params, num_prompt_tokens, facts)
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
