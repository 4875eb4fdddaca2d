"""Request fields of OpenAI's API and vLLM's extensions, and their conversion to a GenerateRequest.

pydantic checks types here; the validator checks ranges. Unknown fields are ignored and listed in a
warning header. Unsupported fields that would change the output are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableSequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    WithJsonSchema,
    create_model,
)

from baton.errors import FieldViolation, InvalidRequest
from baton.sampling_params import ALL_LOGPROBS, MAX_BIASES, SamplingParams
from baton.v1 import inference_pb2, sampling_pb2
from gateway.chat.reasoning import BEGIN, END
from gateway.chat.style import ChatStyle
from gateway.http.errors import Fills, fillers_of, from_validation, invalid, shown_value
from gateway.http.json_body import wrong_ids
from gateway.intake.rules import MAX_SHOWN, MAX_STRUCTURED_CHARS, Violations
from gateway.intake.validator import MAX_CLASS_CHARS, MAX_PRIORITY, MAX_SALT_CHARS

_MAX_UINT32 = 2**32 - 1
_MAX_UINT64 = 2**64
_MAX_SCHEMA_CHARS = MAX_STRUCTURED_CHARS["json_schema"]

BodyT = TypeVar("BodyT", bound="Body")

_Token = Annotated[int, Field(ge=0, le=2**32 - 1)]


def _integer(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def _text(max_chars: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": max_chars}


TOP_K = _integer(-1, _MAX_UINT32)
SEED = _integer(-(2**63), _MAX_UINT64 - 1)
NumTokens = Annotated[int | None, WithJsonSchema(_integer(1, _MAX_UINT32))]
SloClass = Annotated[str | None, WithJsonSchema(_text(MAX_CLASS_CHARS))]

#: Schemas of fields that are parsed here and not by pydantic, for /openapi.json.
_TEXT_OR_LIST = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_RESPONSE_FORMAT = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": {"type": "object", "properties": {"schema": {"type": "object"}}},
        "schema": {"type": "object"},
    },
    "required": ["type"],
}
_STRUCTURED = {
    "type": "object",
    "properties": {
        "json": {"type": ["object", "string"]},
        "regex": {"type": "string"},
        "choice": {"type": "array", "items": {"type": "string"}},
        "grammar": {"type": "string"},
        "json_object": {"type": "boolean"},
        "enable_in_reasoning": {"type": "boolean"},
    },
}

#: Path of the structured output; the first field that is set and fills it wins.
_STRUCTURE = "sampling.structured_output"

#: vLLM's name of an engine option there.
_WHOLE = "enable_in_reasoning"

ThinkingBudget = Annotated[
    int | None, WithJsonSchema(_integer(-1, 2**20)), Fills(f"{_STRUCTURE}.free_text.max_tokens")
]
StructuredOutputs = Annotated[dict[str, Any] | None, WithJsonSchema(_STRUCTURED), Fills(_STRUCTURE)]

#: Reports only the first wrong member, because a report costs 7 us and a kilobyte.
TextList = Annotated[list[str] | None, FailFast()]
TokenList = Annotated[list[_Token] | None, FailFast()]


class Body(BaseModel):
    """A JSON request body. A null field is an absent field."""

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    refused: ClassVar[tuple[str, ...]] = ()
    """Unsupported fields that would change the output."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Fields of other servers without effect here."""
    id_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that may be long lists of token ids; see json_body.read_fields."""

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """Names of unknown fields."""
        known = {*self.refused, *self.ignored}
        return tuple(name for name in self.model_extra or () if name not in known)

    @property
    def refused_fields(self) -> tuple[str, ...]:
        """The fields of `refused` that are set to something other than "no"."""
        given = self.model_extra or {}
        return tuple(name for name in self.refused if given.get(name))


class ModelBody(Body):
    """A body that names a model."""

    model: str | None = None
    """Model, as listed by /v1/models. Optional if only one is served."""


class StreamOptions(Body):
    """What a stream contains besides text."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool | None = None
    """End with a piece that has only the usage."""
    continuous_usage_stats: bool | None = None
    """Report the usage so far with every piece, too; goes with include_usage."""
    include_event_ids: bool | None = None
    """Give events an id; a stream resumes after the one in a `Last-Event-ID` header."""


class ChoiceSoFar(Body):
    """Received part of one choice of an interrupted stream; see GenerateRequest."""

    model_config = ConfigDict(extra="ignore")

    choice: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Index of the choice."""
    token_ids: Annotated[list[_Token], FailFast()] = []
    """All token ids received so far."""
    num_chars: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Length of the received text."""
    has_ended: bool = False
    """Whether a finish_reason was received."""


#: Sampling options with a type of their own here; `echo` differs between completions and chats.
_OWN = ("top_k", "seed", "max_tokens", "logprobs", "prompt_logprobs", "echo")
#: Options of an answer in several choices.
_OF_SEVERAL = ("n", "best_of")

#: All other scalar options: body fields with the same name, type and meaning.
_SAME = {
    name: kind
    for name, kind in get_type_hints(SamplingParams).items()
    if kind in (bool | None, int | None, float | None) and name not in _OWN
}


def _with_sampling_options(cls: type[BodyT]) -> type[BodyT]:
    """Subclass with a field for each of _SAME but _OF_SEVERAL."""
    added: dict[str, Any] = {
        name: (kind, None) for name, kind in _SAME.items() if name not in _OF_SEVERAL
    }
    return create_model(
        cls.__name__, __base__=cls, __module__=cls.__module__, __doc__=cls.__doc__, **added
    )


@_with_sampling_options
class SamplingBody(ModelBody):
    """Fields common to completions, chats and responses."""

    stream: bool | None = None
    """Stream the output as server-sent events."""
    top_k: Annotated[int | None, WithJsonSchema(TOP_K)] = None
    """Keep the k most probable tokens; 0 and -1 keep all."""
    seed: Annotated[int | None, WithJsonSchema(SEED)] = None
    """Same seed, same request, same tokens. Drawn by the server if not given."""
    logit_bias: dict[str, Any] | None = None
    """Values added to logits, by token id."""
    stop: Annotated[Any, WithJsonSchema(_TEXT_OR_LIST)] = None
    stop_token_ids: TokenList = None
    bad_words: TextList = None
    allowed_token_ids: TokenList = None
    logprob_token_ids: TokenList = None
    truncate_prompt_tokens: Annotated[
        int | None, WithJsonSchema(_integer(-1, _MAX_UINT32)), Fills("prompt.keep_last")
    ] = None
    """Keep only the last so many tokens of a longer prompt; -1: as many as the model takes."""
    truncation_side: Literal["left", "right"] | None = None
    """right: keep the first ones instead."""
    return_token_ids: bool | None = None
    """Return token ids with the text, and those of the prompt."""
    return_tokens_as_token_ids: bool | None = None
    """Name tokens `token_id:ID` in log probabilities."""
    return_timing: bool | None = None
    """Return `timing`: milliseconds by phase, and the workers."""
    return_receipt: bool | None = None
    """Return `receipt`: what the answer came from, for `baton check --receipt`."""
    priority: Annotated[int | None, WithJsonSchema(_integer(-MAX_PRIORITY, MAX_PRIORITY))] = None
    """Lower values are served first, among requests of the same API key, or of the same cache_salt
    without keys; default: 0."""
    cache_salt: Annotated[str | None, WithJsonSchema(_text(MAX_SALT_CHARS))] = None
    """Share prefixes in the KV cache only with requests of the same salt."""
    slo_class: SloClass = None
    """Class of requests, with latency targets of its own; default: that of the API key, if it has
    one."""

    refused: ClassVar[tuple[str, ...]] = ("logits_processors", "grammar")


class GenerationBody(SamplingBody):
    """Fields common to completions and chats."""

    stream_options: StreamOptions | None = None
    """What a stream contains besides text; goes with stream."""
    max_tokens: NumTokens = None
    n: Annotated[int | None, Fills("sampling.beam_search.width")] = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    """Search for the n most probable outputs with n beams. Leave out what only sampling reads;
    temperature is not read."""
    length_penalty: Annotated[float | None, Fills("sampling.beam_search.length_penalty")] = None
    """Of a beam search: exponent of the length that divides a beam's log probability."""
    prompt_logprobs: int | None = None
    resume_from: Annotated[list[ChoiceSoFar] | None, FailFast()] = None
    """Output of an interrupted stream of the same request; this one continues after it. Needs
    seed."""
    response_format: Annotated[
        dict[str, Any] | None,
        WithJsonSchema(_RESPONSE_FORMAT),
        Fills(_STRUCTURE, when=lambda asked: asked.get("type") != "text"),
    ] = None
    """Form of the output: text, any JSON object, or JSON by a schema; that may stand beside
    json_object, as for llama.cpp, too."""
    structured_outputs: StructuredOutputs = None
    """Exactly one of the guided fields, without their prefix. With enable_in_reasoning it applies
    to reasoning and tool calls, too, not only to the answer's text."""
    guided_json: Annotated[
        Any, WithJsonSchema({"type": ["object", "string"]}), Fills(_STRUCTURE)
    ] = None
    """JSON Schema that the output must follow, as an object or as text."""
    json_schema: Annotated[
        Any, WithJsonSchema({"type": ["object", "string"]}), Fills(_STRUCTURE)
    ] = None
    """llama.cpp's name of guided_json."""
    guided_regex: Annotated[
        str | None, WithJsonSchema(_text(MAX_STRUCTURED_CHARS["regex"])), Fills(_STRUCTURE)
    ] = None
    """Regular expression, in Rust's syntax, that the whole output must match."""
    guided_choice: Annotated[TextList, Fills(_STRUCTURE)] = None
    """The output is one of these texts."""
    guided_grammar: Annotated[
        str | None, WithJsonSchema(_text(MAX_STRUCTURED_CHARS["grammar"])), Fills(_STRUCTURE)
    ] = None
    """Grammar, in Lark's syntax, with a rule `start` that the output must follow."""

    ignored: ClassVar[tuple[str, ...]] = (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("request_id", "spaces_between_special_tokens"),
    )

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def has_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_usage_everywhere(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)


def validated(cls: type[BodyT], fields: Mapping[str, Any]) -> BodyT:
    """Validate parsed fields. Raises InvalidRequest, naming each wrong field."""
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from None


def json_text(field: str, value: Any, max_chars: int) -> str:
    """Serialize a body's value. Raises InvalidRequest if it is too long, detected before
    serializing all of it, or contains a number that is not finite."""
    try:
        text = "" if _is_longer(value, max_chars) else json.dumps(value, allow_nan=False)
    except ValueError:
        raise invalid(field, "has a number that is not finite; JSON has none") from None
    if not 1 <= len(text) <= max_chars:
        raise invalid(field, f"more than {max_chars} characters as JSON; shorten it")
    return text


def is_json(text: str) -> bool:
    """Whether a text is a whole JSON document."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_longer(value: Any, max_chars: int) -> bool:
    """Whether the value's JSON certainly exceeds `max_chars`; takes about that many steps."""
    num_chars, rest = 0, [value]
    while rest and num_chars <= max_chars:
        one = rest.pop()
        num_chars += len(one) if isinstance(one, str | dict | list) else 1
        if isinstance(one, dict) and num_chars <= max_chars:
            num_chars += sum(map(len, one))
            rest += one.values()
        elif isinstance(one, list) and num_chars <= max_chars:
            rest += one
    return num_chars > max_chars


def sampling_message(
    body: GenerationBody, *, logprobs: int | None, max_tokens: int | None
) -> sampling_pb2.SamplingParams:
    """Sampling parameters of a body. Raises InvalidRequest for values that the message cannot
    hold."""
    params = sampling_pb2.SamplingParams()
    given = body.model_fields_set
    values = [(field, getattr(body, field)) for field in _SAME if field in given]
    values += [("max_tokens", max_tokens)]
    values += [
        (name, ALL_LOGPROBS if num == -1 else num)
        for name, num in (("logprobs", logprobs), ("prompt_logprobs", body.prompt_logprobs))
    ]
    violations: list[FieldViolation] = []
    for field, value in values:
        if value is None:
            continue
        try:
            setattr(params, field, value)
        except ValueError:
            fault = f"{shown_value(value)}: must be from 0 to 2^32 - 1"
            violations.append(FieldViolation(f"sampling.{field}", fault))
    violations += _put_top_k(body.top_k, params)
    violations += _put_seed(body.seed, params)
    violations += _put_bias(body.logit_bias or {}, params)
    violations += _put_stop(body.stop, params)
    violations += _put_structure(body, params)
    violations += _put_beams(body, params)
    params.stop_token_ids.extend(body.stop_token_ids or ())
    params.bad_words.extend(body.bad_words or ())
    params.allowed_token_ids.extend(body.allowed_token_ids or ())
    params.logprob_token_ids.extend(body.logprob_token_ids or ())
    if body.is_streamed and body.prompt_logprobs is not None:
        fault = f"{shown_value(body.prompt_logprobs)}: not with stream; leave out one of them"
        violations.append(FieldViolation("prompt_logprobs", fault))
    if body.stream_options is not None and not body.is_streamed:
        fault = "goes with stream; set it to true, or leave it out"
        violations.append(FieldViolation("stream_options", fault))
    violations += refusals(body, _REFUSALS)
    if violations:
        raise InvalidRequest.of(*violations)
    return params


#: GBNF is llama.cpp's own.
_REFUSALS = {"grammar": "is not served here; give guided_grammar, in Lark's syntax, or json_schema"}


#: A grammar of any text, and any special tokens.
_ANY_TEXT = "start: (/(?s:.+)/ | <[*]>)*"


def put_budget(budget: int | None, style: ChatStyle, sampling: sampling_pb2.SamplingParams) -> None:
    """Bound the tokens of thoughts: by the grammar of what follows them, or of any text. Raises
    InvalidRequest."""
    output = sampling.structured_output
    if budget is None or budget == -1:
        return
    fault = ""
    if not 0 <= budget <= _MAX_UINT32:
        fault = "must be 0 or more, or -1 for any number"
    elif not style.has_thoughts or style.is_harmony:
        fault = "the model has no mark that could end its thoughts; leave it out"
    elif sampling.HasField("structured_output") and not output.HasField("free_text"):
        fault = "goes with a structure of the answer alone; leave out enable_in_reasoning"
    elif not sampling.HasField("structured_output"):
        output.grammar = _ANY_TEXT
        output.free_text.begin, output.free_text.end = BEGIN, END
        output.free_text.has_begun = style.begins_with_thoughts
    if fault:
        raise invalid("thinking_token_budget", f"{shown_value(budget)}: {fault}")
    output.free_text.max_tokens = budget


def refusals(body: Body, faults: Mapping[str, str] = MappingProxyType({})) -> list[FieldViolation]:
    """Violations for unsupported fields that are set. faults: by field, instead of the usual."""
    usual = "is not served here; leave it out"
    return [FieldViolation(name, faults.get(name, usual)) for name in body.refused_fields]


def generate_request(
    body: GenerationBody, sampling: sampling_pb2.SamplingParams
) -> inference_pb2.GenerateRequest:
    """A request without prompt. The caller writes the prompt in place, because copying a long one
    takes tens of milliseconds."""
    request = inference_pb2.GenerateRequest(
        model=body.model or "",
        sampling=sampling,
        cache_salt=body.cache_salt or "",
        slo_class=body.slo_class or "",
    )
    request.return_receipt = bool(body.return_receipt)
    try:
        request.priority = body.priority or 0
    except ValueError:
        fault = f"{shown_value(body.priority)}: must be a number of 32 bits"
        raise invalid("priority", fault) from None
    kept = body.truncate_prompt_tokens
    if kept is not None:
        if not -1 <= kept <= _MAX_UINT32:
            fault = f"{shown_value(kept)}: must be 1 or more, or -1 for all that the model takes"
            raise invalid("truncate_prompt_tokens", fault)
        request.prompt.keep_last = _MAX_UINT32 if kept == -1 else kept
        request.prompt.keeps_first = body.truncation_side == "right"
    for entry in body.resume_from or ():
        request.resume_from.add(**entry.model_dump(include=set(ChoiceSoFar.model_fields)))
    return request


def put_token_ids(field: str, value: Any, ids: MutableSequence[int]) -> None:
    """Append the ids of a field, a list or TokenIds. Raises InvalidRequest for anything else."""
    if isinstance(value, inference_pb2.TokenIds):
        value = value.ids
    elif not isinstance(value, list):
        raise invalid(field, f"{shown_value(value)}: give a list of token ids")
    try:
        ids.extend(value)
    except (TypeError, ValueError):
        raise wrong_ids(field, value) from None


def _put_beams(body: GenerationBody, params: sampling_pb2.SamplingParams) -> Violations:
    """A beam search in vLLM's form: as many beams as outputs, and a temperature without effect."""
    if body.use_beam_search:
        params.ClearField("temperature")
        params.beam_search.width = params.n or 1
        if body.length_penalty is not None:
            params.beam_search.length_penalty = body.length_penalty
    elif body.length_penalty is not None:
        yield FieldViolation("length_penalty", "goes with use_beam_search; leave it out")


def _put_top_k(top_k: int | None, params: sampling_pb2.SamplingParams) -> Violations:
    if top_k is None:
        return
    if top_k == -1:  # all tokens, as in vLLM, also where the model has a default
        params.top_k = 0
    elif 0 <= top_k < 2**32:
        params.top_k = top_k
    else:
        yield FieldViolation("top_k", f"{shown_value(top_k)}: must be 0 or more, or -1 for all")


def _put_seed(seed: int | None, params: sampling_pb2.SamplingParams) -> Violations:
    if seed is None:
        return
    if -(_MAX_UINT64 // 2) <= seed < _MAX_UINT64:
        params.seed = seed % _MAX_UINT64
    else:
        yield FieldViolation("seed", f"{shown_value(seed)}: must be a number of 64 bits")


def _put_bias(bias: Mapping[str, Any], params: sampling_pb2.SamplingParams) -> Violations:
    if len(bias) > MAX_BIASES:
        yield FieldViolation("logit_bias", f"{len(bias)} entries: give at most {MAX_BIASES}")
        return
    keys = [text for text in bias if not (text.isascii() and text.isdecimal() and len(text) < 10)]
    if keys:
        shown = ", ".join(map(shown_value, keys[:MAX_SHOWN]))
        yield FieldViolation("logit_bias", f"{shown}: keys must be token ids")
        return
    for text, value in bias.items():
        if type(value) not in (int, float) or not abs(value) < _MAX_UINT64:
            yield FieldViolation(f"logit_bias.{text}", f"{shown_value(value)}: must be a number")
            return
        params.logit_bias[int(text)] = value


def _put_stop(stop: Any, params: sampling_pb2.SamplingParams) -> Violations:
    if stop is None:
        return
    texts = [stop] if isinstance(stop, str) else stop
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        params.stop.extend(texts)
    else:
        yield FieldViolation("stop", f"{shown_value(stop)}: must be a string, or a list of them")


def is_whole_structured(body: GenerationBody) -> bool:
    """Whether the structured output includes reasoning and tool calls."""
    return bool((body.structured_outputs or {}).get(_WHOLE))


def structure_field(body: GenerationBody) -> str:
    """The field that requests a structured output, the first of several; empty if there is none."""
    return next(iter(fillers_of(_STRUCTURE, body)), "")


def _put_structure(body: GenerationBody, params: sampling_pb2.SamplingParams) -> Violations:
    first, *others = fillers_of(_STRUCTURE, body) or [""]
    for field in others:
        yield FieldViolation(field, f"the output has one form; leave it out, or {first}")
    yield from _put_structure_of(first, body, params)


def _put_structure_of(
    field: str, body: GenerationBody, params: sampling_pb2.SamplingParams
) -> Violations:
    if field == "response_format":
        yield from _put_response_format(body.response_format or {}, params)
    elif field == "structured_outputs":
        asked = {k: v for k, v in (body.structured_outputs or {}).items() if v not in (None, False)}
        asked.pop(_WHOLE, None)
        kinds = asked.keys() & {"json", "regex", "choice", "grammar", "json_object"}
        if len(kinds) != 1 or asked.keys() - kinds:
            yield FieldViolation(
                field, "give one of json, regex, choice, grammar and json_object, and nothing else"
            )
            return
        (kind,) = kinds
        yield from _put_kind(f"{field}.{kind}", kind, asked[kind], params)
    elif field:
        kind = field.removeprefix("guided_").replace("json_schema", "json")
        yield from _put_kind(field, kind, getattr(body, field), params)


def _put_response_format(
    asked: Mapping[str, Any], params: sampling_pb2.SamplingParams
) -> Violations:
    field, schema = "response_format.json_schema.schema", asked.get("json_schema")
    match asked.get("type"):
        case "json_object" if asked.get("schema") is None:
            params.structured_output.json_object = True
            return
        case "json_object":
            field, inner = "response_format.schema", asked["schema"]
        case "json_schema":
            inner = schema.get("schema") if isinstance(schema, dict) else None
        case kind:
            yield FieldViolation(
                "response_format.type",
                f"{shown_value(kind)}: must be text, json_object or json_schema",
            )
            return
    if isinstance(inner, dict):
        params.structured_output.json_schema = json_text(field, inner, _MAX_SCHEMA_CHARS)
    else:
        yield FieldViolation(field, f"{shown_value(inner)}: must be a JSON Schema, an object")


def _put_kind(field: str, kind: str, value: Any, params: sampling_pb2.SamplingParams) -> Violations:
    output = params.structured_output
    match kind, value:
        case "json", str():
            output.json_schema = value
        case "json", dict():
            output.json_schema = json_text(field, value, _MAX_SCHEMA_CHARS)
        case "regex", str():
            output.regex = value
        case "grammar", str():
            output.grammar = value
        case "json_object", True:
            output.json_object = True
        case "choice", list() if all(isinstance(text, str) for text in value):
            output.choice.values.extend(value)
            output.choice.SetInParent()
        case _:
            yield FieldViolation(field, f"{shown_value(value)}: is not of its type")
