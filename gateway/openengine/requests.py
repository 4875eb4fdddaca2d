"""Converts OpenEngine requests to Baton's; refuses unsupported fields by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from baton.errors import FieldViolation, InvalidRequest
from baton.v1 import inference_pb2, sampling_pb2
from gateway.intake.validator import MAX_PRIORITY
from gateway.openengine.v1 import openengine_pb2 as oe

_PRIORITY, _TARGET_RANK = "openengine-priority", "openengine-target-dp-rank"
_SAME = frozenset(
    {
        *("temperature", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    }
)
#: Prefixes of Baton's field paths, as in the validator's violations, and OpenEngine's names for
#: them.
_FIELDS = {
    "sampling.n": "sampling.num_sequences",
    "sampling.max_tokens": "stopping.max_tokens",
    "sampling.min_tokens": "stopping.min_tokens",
    "sampling.ignore_eos": "stopping.ignore_eos",
    "sampling.stop": "stopping.conditions",
    "sampling.stop_token_ids": "stopping.conditions",
    "sampling.logprobs": "response.output_candidates",
    "sampling.prompt_logprobs": "response.prompt_candidates",
    "sampling.structured_output": "guided",
    "prompt.text": "prompt",
    "prompt.token_ids": "token_ids",
    "prompt": "input",
    "cache_salt": "kv.cache_salt",
    "priority": _PRIORITY,
}


def to_baton(
    request: oe.GenerateRequest, metadata: Sequence[tuple[str, str | bytes]]
) -> inference_pb2.GenerateRequest:
    """Convert a request. Raises InvalidRequest for all unsupported fields."""
    wrong = [*_unsupported(request)]
    priority = _priority(metadata, wrong)
    sampling = _sampling(request, wrong)
    if wrong:
        raise InvalidRequest.of(*wrong)
    prompt = inference_pb2.Prompt()
    match request.WhichOneof("input"):
        case "prompt":
            prompt.text = request.prompt
        case "token_ids":
            prompt.token_ids.ids.extend(request.token_ids.ids)
    return inference_pb2.GenerateRequest(
        model=request.lora_name or request.model,
        prompt=prompt,
        sampling=sampling,
        priority=priority,
        cache_salt=request.kv.cache_salt,
    )


def with_openengine_fields(error: InvalidRequest) -> InvalidRequest:
    """The error with OpenEngine's field names."""
    if not error.violations:
        return error
    named = [FieldViolation(_field(v.field), v.description) for v in error.violations]
    renamed = InvalidRequest.of(*named)
    renamed.request_id = error.request_id
    return renamed


def _field(path: str) -> str:
    for known in sorted(_FIELDS, key=len, reverse=True):
        if path.startswith(known) and path[len(known) : len(known) + 1] in ("", ".", "["):
            return _FIELDS[known] + path[len(known) :]
    return path


def _unsupported(request: oe.GenerateRequest) -> Iterator[FieldViolation]:
    if request.media:
        yield FieldViolation("media", f"{len(request.media)} items: models here read text alone")
    if request.kv.HasField("session"):
        yield FieldViolation(
            "kv.session",
            f"{request.kv.session.session_id!r}: this engine is AGGREGATED, and hands KV over by "
            "itself; leave it out",
        )
    if request.kv.bypass_prefix_cache:
        yield FieldViolation(
            "kv.bypass_prefix_cache", "true: not supported; a cache_salt of its own does it"
        )
    if request.guided.backend not in ("", "llguidance"):
        yield FieldViolation("guided.backend", f"{request.guided.backend!r}: must be llguidance")
    if request.guided.WhichOneof("guide") == "structural_tag":
        yield FieldViolation("guided.structural_tag", "not supported; use json_schema or regex")


def _priority(metadata: Sequence[tuple[str, str | bytes]], wrong: list[FieldViolation]) -> int:
    """Baton's priority, where lower numbers are served first."""
    priority = _number(metadata, _PRIORITY, range(-MAX_PRIORITY, MAX_PRIORITY + 1), wrong)
    _number(metadata, _TARGET_RANK, range(1), wrong)
    return -priority


def _number(
    metadata: Sequence[tuple[str, str | bytes]], key: str, known: range, wrong: list[FieldViolation]
) -> int:
    values = [value for name, value in metadata if name == key]
    if not values:
        return 0
    with contextlib.suppress(ValueError):
        if len(values) == 1 and (number := int(values[0])) in known:
            return number
    text = ", ".join(repr(value) for value in values)
    wrong.append(FieldViolation(key, f"{text}: must be one whole number, {known[0]}..{known[-1]}"))
    return 0


def _num_candidates(
    response: oe.ResponseOptions, side: str, wrong: list[FieldViolation]
) -> int | None:
    """Number of alternatives per position; None for no log probabilities."""
    if not getattr(response, f"return_{side}_logprobs"):
        return None
    field = f"{side}_candidates"
    chosen: oe.CandidateTokenSelection = getattr(response, field)
    selection = chosen.WhichOneof("selection")
    if selection in ("token_ids", "all"):
        wrong.append(
            FieldViolation(f"response.{field}.{selection}", "not supported; use top_n, up to 20")
        )
    return chosen.top_n


def _sampling(
    request: oe.GenerateRequest, wrong: list[FieldViolation]
) -> sampling_pb2.SamplingParams:
    given, stopping, ends = request.sampling, request.stopping, request.stopping.conditions
    # Options with the same name and meaning in both protocols are copied if set.
    same = {
        field.name: value
        for options in (given, stopping)
        for field, value in options.ListFields()
        if field.name in _SAME
    }
    sampling = sampling_pb2.SamplingParams(
        **same,
        n=given.num_sequences if given.HasField("num_sequences") else None,
        stop=[each.stop_text for each in ends if each.HasField("stop_text")],
        stop_token_ids=[each.stop_token_id for each in ends if each.HasField("stop_token_id")],
        include_stop_str_in_output=stopping.include_stop_in_output,
        structured_output=_structured_output(request.guided),
        logprobs=_num_candidates(request.response, "output", wrong),
        prompt_logprobs=_num_candidates(request.response, "prompt", wrong),
    )
    if given.top_k < -1:
        text = f"{given.top_k}: must be at least 1; 0 or -1 keep all"
        wrong.append(FieldViolation("sampling.top_k", text))
    elif given.HasField("top_k"):
        sampling.top_k = max(given.top_k, 0)
    return sampling


def _structured_output(guided: oe.GuidedDecoding) -> sampling_pb2.StructuredOutput | None:
    match guided.WhichOneof("guide"):
        case "json_schema":
            return sampling_pb2.StructuredOutput(json_schema=guided.json_schema)
        case "regex":
            return sampling_pb2.StructuredOutput(regex=guided.regex)
        case "ebnf_grammar":
            return sampling_pb2.StructuredOutput(grammar=guided.ebnf_grammar)
        case "choice":
            values = sampling_pb2.StringList(values=guided.choice.choices)
            return sampling_pb2.StructuredOutput(choice=values)
        case "json_object":
            return sampling_pb2.StructuredOutput(json_object=True)
        case _:
            return None
